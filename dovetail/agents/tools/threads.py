"""Run a blocking function without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any


async def call_function(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result of `function`: awaited where it is async, otherwise run in a thread of its own.

    Each call has its own daemon thread: a call that hangs is given up by its caller's deadline, and a pool would lose
    a place to it for ever and would keep the process from ending.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001  raised again by whoever awaits
            _report(loop, future, error, None)
        else:
            _report(loop, future, None, result)

    threading.Thread(target=run, daemon=True, name=f"tool-{getattr(function, '__name__', 'call')}").start()
    result = await future
    return await result if inspect.isawaitable(result) else result


def _report(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], error: BaseException | None, result: Any
) -> None:
    def report() -> None:
        if future.done():  # the caller's deadline has passed
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, (StopIteration, SystemExit, KeyboardInterrupt)):
            # A future takes no StopIteration, and `exit()` in a tool must not end the loop.
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            future.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop has been closed
        loop.call_soon_threadsafe(report)
