"""Jobs beside the driver: in order, one at a time, errors not lost."""

from __future__ import annotations

import threading

import pytest

from dovetail.observability.background import Background

pytestmark = pytest.mark.unit


def test_a_job_runs_beside_the_caller_and_the_next_one_waits_for_it() -> None:
    background, may_end, done = Background("test"), threading.Event(), []
    background.submit(lambda: (may_end.wait(10), done.append(1)))
    assert done == []
    threading.Timer(0.05, may_end.set).start()
    background.submit(lambda: done.append(2))
    background.close()
    assert done == [1, 2]


def test_an_error_is_raised_once_by_the_next_call() -> None:
    def fail() -> None:
        raise OSError("No space left on device")

    background = Background("test")
    background.submit(fail)
    with pytest.raises(OSError, match="No space left"):
        background.wait()
    background.wait()
    background.submit(fail)
    with pytest.raises(OSError, match="No space left"):
        background.close()
