"""Coroutine functions that behave well and badly, for the scoring processes of the tests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import time
from typing import Any

_running = 0
_arrived: dict[str, list[asyncio.Event]] = {}


class _NoPickle:
    def __reduce__(self) -> Any:
        raise RuntimeError("it has no pickle")


async def judge(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, Any]:
    global _running
    _running += 1
    try:
        return {"score": 0.5, "running": await _behave(solution_str, ground_truth), "pid": os.getpid()}
    finally:
        _running -= 1


async def _behave(answer: str, given: Any) -> int:
    if answer == "meet":  # ends when `given` calls are here at the same time
        events = _arrived.setdefault(answer, [])
        events.append(asyncio.Event())
        if len(events) == given:
            for event in _arrived.pop(answer):
                event.set()
        else:
            await events[-1].wait()
    elif answer == "stuck":
        await asyncio.sleep(3600)
    elif answer == "stubborn":
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
    elif answer == "block":
        time.sleep(3600)
    elif answer == "exit":
        os._exit(7)
    elif answer == "sys.exit":
        sys.exit(3)
    elif answer == "raise":
        raise TimeoutError("the judge does not answer")
    elif answer == "lambda":
        return lambda: 0  # type: ignore[return-value]
    elif answer == "unpicklable":
        return _NoPickle()  # type: ignore[return-value]
    else:
        await asyncio.sleep(float(answer))
    return _running


async def by_name(response: str) -> float:
    await asyncio.sleep(0)
    return float(len(response))


class Judge:
    """An object that is called, as one that keeps a client is."""

    async def __call__(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        return 1.0


instance = Judge()


def _waits(function: Any) -> Any:
    """A decorator that makes a plain function of an async one."""

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(function(*args, **kwargs))

    return plain


decorated = _waits(by_name)


async def batch(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> list[float]:
    return [1.0 for _ in solution_strs]
