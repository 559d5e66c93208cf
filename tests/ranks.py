"""Run a function on N real processes joined by gloo, for tests. Knows nothing of what the function does.

Processes come from a fork server that has torch imported already: a case costs a fraction of a second, and no rank
inherits threads from pytest. The function must live at the top of an importable module.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preloaded"])


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180.0) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on ``world_size`` processes; return what each rank returned, by rank.

    The first failing rank's traceback is raised here and the other ranks are killed, so a collective that waits for a
    dead peer cannot hang a test. ``timeout`` is in seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        return _run(fn, world_size, os.path.join(folder, "store"), args, timeout)


def run_alone(fn: Callable[..., Any], *args: Any, timeout: float = 180.0) -> Any:
    """What ``fn(0, 1, *args)`` returns in a process of its own that belongs to no group."""
    return _run(fn, 1, None, args, timeout)[0]


def _run(fn: Callable[..., Any], world_size: int, store: str | None, args: tuple, timeout: float) -> list[Any]:
    processes, pipes = [], []
    for rank in range(world_size):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        whole = (fn, rank, world_size, store, timeout, sender, args)
        process = _CONTEXT.Process(target=_main, args=whole, daemon=True)
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        return _collect(processes, pipes, time.monotonic() + timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _collect(processes: list[Any], pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, tuple[float, str]] = {}  # when, and what
    while len(results) < len(pipes):
        had_failed = bool(failures)
        for rank, pipe in enumerate(pipes):
            if rank in results or rank in failures or not pipe.poll(0.02):
                continue
            try:
                ok, value, when = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                failures[rank] = 0.0, f"rank {rank} died with exit code {processes[rank].exitcode}"
                continue
            if ok:
                results[rank] = value
            else:
                failures[rank] = when, f"rank {rank} failed:\n{value}"
        if had_failed:  # all were asked since: one that waited for the first to fail may have been read before it
            raise RuntimeError(min(failures.values())[1])
        if time.monotonic() > deadline:
            missing = sorted(set(range(len(pipes))) - set(results))
            raise TimeoutError(f"ranks {missing} of {len(pipes)} did not finish in time")
    return [results[rank] for rank in range(len(pipes))]


def _main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str | None,
    timeout: float,
    sender: Connection,
    args: tuple,
) -> None:
    if store is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    faulthandler.enable(sys.__stderr__)  # where a rank that dies of a signal was
    torch.set_num_threads(1)
    try:
        if store is not None:
            place = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=timeout)}
            dist.init_process_group("gloo", init_method=f"file://{store}", **place)
        value = fn(rank, world_size, *args)
        if store is not None:
            dist.barrier()
            dist.destroy_process_group()
        # Plain pickle copies tensors. The connection's own would send handles to memory that dies with this process.
        sender.send_bytes(pickle.dumps((True, value, time.monotonic())))
    except BaseException:  # noqa: BLE001  the process boundary: the test process raises it again
        sender.send_bytes(pickle.dumps((False, traceback.format_exc(), time.monotonic())))
