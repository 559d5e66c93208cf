"""Work of later tests that needs nothing of this process, done beside the tests before them: two pieces at a time.

Most tests keep one core busy. What a module computes in processes of its own anyway can use the others meanwhile, and
stands back where there are too few: tests that had to share would leave a core idle at the end.

    @ahead
    def updated(folder: Path) -> Found: ...

makes a fixture of the module whose value is what the function returns. It is called on a thread, with an empty folder,
if a selected test asks for it, so it must leave this process alone: no random numbers, no environment, no current
folder, nothing but other processes. Further parameters are those of a parametrized test; such a fixture is a `Future`,
one for each value, for the test itself to ask.

Modules that ask for such work come after all others: a test that waits leaves this process idle, and once the queue is
empty a core. What a folder's tests share for the session, such as a Ray that other folders may stop, is not theirs.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

_AT_ONCE = 2
_NICENESS = 5
"""A third of the weight of a test: not so little that a time limit within the work comes near."""
_WORK: dict[tuple[str, str], Callable[..., Any]] = {}
"""By the name of a module and of a fixture."""

Key = tuple[str, str, tuple[str, ...]]
"""Module, fixture, values of the parameters in words."""


def ahead(work: Callable[..., Any]) -> Any:
    """The fixture of this work."""
    parameters = list(inspect.signature(work).parameters)[1:]
    place = work.__module__, work.__name__
    _WORK[place] = work

    @pytest.fixture(name=work.__name__, scope="function" if parameters else "module")
    def fixture(request: pytest.FixtureRequest, started_ahead: dict[Key, Future]) -> Any:
        found = started_ahead[(*place, _values(request.node, parameters))]
        return found if parameters else found.result()

    return fixture


@contextmanager
def starting(items: Sequence[Any], new_folder: Callable[[str], Path]) -> Iterator[dict[Key, Future]]:
    """Queue what the selected tests ask for, in their order; what has not begun at the end is given up."""
    if any(map(waits_for_work, items)):
        forkserver.ensure_running()  # here, because it is as nice as whoever starts it, and serves the tests too
    pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ahead", initializer=_stand_back)
    started: dict[Key, Future] = {}
    try:
        for item in items:
            for work in _work_of(item):
                parameters = list(inspect.signature(work).parameters)[1:]
                key = (work.__module__, work.__name__, _values(item, parameters))
                if key not in started:
                    values = [item.callspec.params[parameter] for parameter in parameters]
                    started[key] = pool.submit(work, new_folder(work.__name__), *values)
        yield started
    finally:
        pool.shutdown(cancel_futures=True)


def in_order_of_waiting(items: Sequence[Any]) -> list[Any]:
    """Modules that ask for no work done ahead, those that do, those marked quiet; otherwise in their order."""
    waiting = {item.module.__name__ for item in items if waits_for_work(item)}
    return sorted(items, key=lambda item: 2 if item.get_closest_marker("quiet") else item.module.__name__ in waiting)


def waits_for_work(item: Any) -> bool:
    """Whether a test asks for something that is done ahead."""
    return bool(_work_of(item))


def _stand_back() -> None:
    """On Linux the niceness is this thread's alone; its processes inherit it."""
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)


def _work_of(item: Any) -> list[Callable[..., Any]]:
    places = [(item.module.__name__, name) for name in getattr(item, "fixturenames", ())]
    return [_WORK[place] for place in places if place in _WORK]


def _values(node: Any, parameters: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(node.callspec.params[parameter]) for parameter in parameters)
