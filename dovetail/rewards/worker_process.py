"""The program of one scoring process: reads calls from a socket, runs one at a time, sends back what came out.
Coroutine functions run side by side, where the driver sends several calls.

Started as `python -m dovetail.rewards.worker_process <socket> <file with the start message>` by
`dovetail.rewards.pool`. When the other end goes away it kills itself with everything it started, even in the middle of
a call.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from dovetail.config.user_code import UserCodeError
from dovetail.rewards import decoding, functions, signatures
from dovetail.rewards.decoding import TokenIds, decode_call, with_texts
from dovetail.rewards.errors import RewardError
from dovetail.rewards.functions import (
    NUMBER,
    EventLoop,
    FunctionSpec,
    StartMessage,
    call_function,
    combine_results,
    is_coroutine_function,
    load_function,
    read_result,
)

Reply = tuple[str, Any]
_REGISTRY = os.path.join(os.path.dirname(__file__), "registry.py")  # by name: it imports what few functions need
_LEADING = (__file__, functions.__file__, signatures.__file__, decoding.__file__, _REGISTRY)


def main(fd: int, start_file: int) -> None:
    """Serve until the driver closes the socket."""
    faulthandler.enable()
    _die_with_parent()
    connection = Connection(fd)
    loop = _LazyLoop()
    try:
        start: StartMessage = pickle.loads(_read_whole(start_file))
        # What the driver can import, this process can too. Set before anything of the user's is loaded.
        sys.path[:] = list(dict.fromkeys([*start.search_path, *sys.path]))
        for module in start.import_modules:
            importlib.import_module(module)
        loaded = [load_function(spec, start.arguments, start.columns) for spec in start.specs]
        decode = _no_decoder if start.decoder is None else start.decoder.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001  the process boundary: the driver raises it
        # These say all there is to say; other code that fails has a traceback of its own.
        is_plain = isinstance(error, (UserCodeError, RewardError))
        _send(connection, 0, ("unusable", str(error)) if is_plain else ("exception", traceback.format_exc()))
        return
    if start.async_calls > 1 and not start.is_batch and all(map(is_coroutine_function, loaded)):
        _send(connection, 0, ("ready", start.async_calls))
        loop.run_until_complete(_serve_together(connection, loaded, start, decode))
        return
    _send(connection, 0, ("ready", 1))
    # A plain function may ask for the current loop. From Python 3.14 on there is none unless somebody has set it, also
    # for one that imports asyncio in its body.
    if "asyncio" in sys.modules or sys.version_info >= (3, 14):
        loop.get()
    score = _score_batch if start.is_batch else _score_one
    while True:
        try:
            number, call = _receive(connection)
        except (EOFError, OSError):
            return
        _send(connection, number, _reply(lambda given: score(loaded, start.specs, given, loop), call, decode))


async def _serve_together(
    connection: Connection,
    functions: Sequence[Callable[..., Any]],
    start: StartMessage,
    decode: Callable[[TokenIds], str],
) -> None:
    """Until the driver closes the socket. A call that waits for a server lets the others run."""
    import asyncio

    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    closed = loop.create_future()

    async def answer(number: int, call: Mapping[str, Any]) -> None:
        _send(connection, number, await _reply_in_time(functions, start, call, decode))

    def receive() -> None:
        try:
            task = loop.create_task(answer(*_receive(connection)))
        except (EOFError, OSError):
            loop.remove_reader(connection.fileno())
            closed.set_result(None)
            return
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_reader(connection.fileno(), receive)
    await closed


async def _reply_in_time(
    functions: Sequence[Callable[..., Any]],
    start: StartMessage,
    call: Mapping[str, Any],
    decode: Callable[[TokenIds], str],
) -> Reply:
    import asyncio

    limit = asyncio.timeout(start.timeout_seconds)
    try:
        decoded, texts = decode_call(call, decode)
        async with limit:
            results = [
                read_result(await function(**{**decoded, **spec.kwargs}))
                for function, spec in zip(functions, start.specs, strict=True)
            ]
        return "result", with_texts(combine_results(results, start.specs), texts)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001  as in `_reply`; only we cancel
        if limit.expired():
            return "timeout", None
        return "exception", _users_part(error) + _lacking_truth(error, call)


def _receive(connection: Connection) -> tuple[int, Mapping[str, Any]]:
    message = connection.recv_bytes()
    return NUMBER.unpack_from(message)[0], pickle.loads(memoryview(message)[NUMBER.size :])


def _send(connection: Connection, number: int, reply: Reply) -> None:
    try:
        # Not `send`: its pickler passes tensors on as open files, which the driver cannot fetch.
        message = pickle.dumps(reply, protocol=5)
    except Exception as error:  # noqa: BLE001  a user's object may fail in any way
        message = pickle.dumps(("exception", f"the reward function returned what cannot be sent: {error}"))
    connection.send_bytes(NUMBER.pack(number) + message)


def _read_whole(file: int) -> bytes:
    """From the beginning, wherever other processes have read: they share the file's position."""
    parts, size = [], 0
    while part := os.pread(file, 1 << 26, size):
        parts.append(part)
        size += len(part)
    os.close(file)
    return b"".join(parts)


def _reply(
    score: Callable[[Mapping[str, Any]], Any], call: Mapping[str, Any], decode: Callable[[TokenIds], str]
) -> Reply:
    try:
        decoded, texts = decode_call(call, decode)
        return "result", with_texts(score(decoded), texts)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the process boundary: the row is marked as failed
        return "exception", _users_part(error) + _lacking_truth(error, call)


def _users_part(error: BaseException) -> str:
    """The traceback without the frames that lead to the reward function; without any, what we refuse in words."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in _LEADING:
        frame = frame.tb_next
    if frame is None:
        return f"{error}\n"
    return "".join(traceback.format_exception(error.with_traceback(frame)))


def _lacking_truth(error: BaseException, call: Mapping[str, Any]) -> str:
    """Names the likely cause of `ground_truth.strip()` or `float(ground_truth)` failing on None."""
    truths = call.get("ground_truths", [call.get("ground_truth")])
    if isinstance(error, signatures.MissingColumnError):
        return ""  # it names a column of its own
    if not isinstance(error, (TypeError, AttributeError)) or all(truth is not None for truth in truths):
        return ""
    return (
        "The row has no ground truth, so the function got ground_truth=None. Put it into the column reward_model "
        "({'ground_truth': ...}) or ground_truth; other columns of the row are in extra_info by their names.\n"
    )


def _no_decoder(ids: TokenIds) -> str:
    raise RewardError("this scoring process was given token ids and no tokenizer.")


def _score_one(
    functions: Sequence[Callable[..., Any]],
    specs: Sequence[FunctionSpec],
    call: Mapping[str, Any],
    loop: EventLoop,
) -> dict[str, Any]:
    results = [
        read_result(call_function(function, {**call, **spec.kwargs}, loop))
        for function, spec in zip(functions, specs, strict=True)
    ]
    return combine_results(results, specs)


def _score_batch(
    functions: Sequence[Callable[..., Any]],
    specs: Sequence[FunctionSpec],
    call: Mapping[str, Sequence[Any]],
    loop: EventLoop,
) -> list[dict[str, Any] | str]:
    """One entry per row: its columns, or a message when the value of that row is no score."""
    rows = len(next(iter(call.values())))
    columns: list[list[Any]] = []
    for function, spec in zip(functions, specs, strict=True):
        results = call_function(function, {**call, **spec.kwargs}, loop)
        columns.append(signatures.score_list(results, rows, spec.name))
    return [_read_row(row, specs) for row in zip(*columns, strict=True)]


def _read_row(results: Sequence[Any], specs: Sequence[FunctionSpec]) -> dict[str, Any] | str:
    try:
        return combine_results([read_result(result) for result in results], specs)
    except ValueError as error:
        return str(error)


class _LazyLoop:
    """The event loop of all calls. Importing asyncio is half of a start, and few functions are coroutines."""

    def __init__(self) -> None:
        self._loop: EventLoop | None = None

    def get(self) -> EventLoop:
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop

    def run_until_complete(self, coroutine: Coroutine[Any, Any, Any], /) -> Any:
        return self.get().run_until_complete(coroutine)


def _die_with_parent() -> None:
    # Standard input is a pipe whose other end only the driver holds: it closes when the driver dies, however it dies.
    # The user's code gets an empty standard input instead.
    lifeline = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
