"""Run a blocking function without blocking the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
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
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # a caller that gives up cancels its own side alone
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(function, *args, **kwargs)
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # A coroutine cannot raise the first, and `exit()` in a tool must not end the loop.
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        except BaseException as error:  # noqa: BLE001  raised again by whoever awaits
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True, name=f"tool-{getattr(function, '__name__', 'call')}").start()
    result = await asyncio.wrap_future(future)
    return await result if inspect.isawaitable(result) else result
