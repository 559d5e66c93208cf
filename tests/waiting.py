"""Wait for what has to happen, by asking again and again until a deadline. Tests sleep nowhere else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import psutil

T = TypeVar("T")


def wait_until(ask: Callable[[], T], what: str, *, seconds: float = 60.0, longest_pause: float = 0.1) -> T:
    """The first true answer. The deadline catches what never comes: it is far beyond what a busy machine needs.

    Where asking interrupts what is waited for, allow it longer pauses.
    """
    deadline, pause = time.monotonic() + seconds, 0.002
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(pause)
        pause = min(1.3 * pause, longest_pause)
    return answer


async def wait_in_loop(ask: Callable[[], T], what: str, *, seconds: float = 60.0) -> T:
    """As `wait_until`, while the event loop goes on."""
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.002)
    return answer


def on_thread(work: Callable[..., T], *args: Any) -> Future[T]:
    """`work(*args)` on a thread of its own: `result(seconds)` waits for what it returns or raises."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work, *args)
    pool.shutdown(wait=False)
    return future


def wait_until_gone(*pids: int, seconds: float = 60.0) -> None:
    """Until none of these processes runs; one that has ended and was not waited for is gone."""
    wait_until(lambda: not any(map(is_running, pids)), f"the end of processes {list(pids)}", seconds=seconds)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_it_works(pid: int, cpu_seconds: float = 0.1) -> None:
    """Until a process that was idle has computed for this long: it is in the middle of what it was asked to do."""
    start = sum(psutil.Process(pid).cpu_times()[:2])
    wait_until(lambda: sum(psutil.Process(pid).cpu_times()[:2]) >= start + cpu_seconds, f"work of process {pid}")
