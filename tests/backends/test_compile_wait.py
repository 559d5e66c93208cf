"""The first pass of a run waits for the process that compiles its layers: for its own, once, and not for long."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dovetail.backends.build import build_backend
from dovetail.backends.compile_ahead import FIRST_PASS, CompileAhead, Pass
from dovetail.models.compile import uncompiled
from dovetail.observability.waits import _REGISTER
from tests.backends.tiny import FP32, OPTIM, tiny_batch, tiny_policy, total_weight, weighted_nll
from tests.waiting import on_thread, wait_until

pytestmark = pytest.mark.unit

WHO = "the first pass (grad)"


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[threading.Event]:
    """Processes that compile until this is set, and of whose bound no test sees the end unless it sets another."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("dovetail.backends.compile_ahead.WAIT_S", 600.0)
    end = threading.Event()

    def compiles(child: Any, job: bytes) -> None:
        end.wait(60)
        child.outcome = "3.0 s"

    monkeypatch.setattr("dovetail.backends.compile_ahead._Child._run", compiles)
    yield end
    end.set()


def run_through(ahead: CompileAhead, name: Pass) -> None:
    with ahead.around(name):
        pass


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.args for record in caplog.records if record.msg == FIRST_PASS and isinstance(record.args, dict)]


def waits() -> list[str]:
    return [wait.who for wait in list(_REGISTER._open) if wait.who == WHO]


def test_the_first_pass_begins_when_its_process_has_ended(
    ends: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = CompileAhead(b"", ("grad",))
    first = on_thread(run_through, ahead, "grad")
    wait_until(waits, "an announced wait")
    assert not first.done()
    ends.set()
    first.result(30)
    assert not waits()
    (said,) = lines(caplog)
    assert (said["name"], said["ahead"]) == ("grad", "3.0 s")
    assert said["waited_s"] > 0
    run_through(ahead, "grad")
    assert len(lines(caplog)) == 1, "only the first pass says it"


def test_it_begins_at_the_bound_without_what_is_not_ready(
    ends: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.backends.compile_ahead.WAIT_S", 0.05)
    ahead = CompileAhead(b"", ("grad", "no_grad"))
    run_through(ahead, "grad")
    monkeypatch.setattr("dovetail.backends.compile_ahead.WAIT_S", 600.0)
    run_through(ahead, "grad")  # once
    (said,) = lines(caplog)
    assert said["ahead"] == "not ready"
    assert said["waited_s"] >= 0.05
    assert "layers compiled ahead: not ready, waited for 0." in caplog.text


def test_nothing_is_started_where_an_earlier_run_left_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    mark = tmp_path / "layers"
    succeeds, fails = tmp_path / "succeeds", tmp_path / "fails"
    for program, status in ((succeeds, 0), (fails, 1)):
        program.write_text(f"#!/bin/sh\ncat > /dev/null\nexit {status}\n")
        program.chmod(0o755)
    for program, marks in ((fails, []), (succeeds, ["layers-grad"])):
        monkeypatch.setattr(sys, "executable", str(program))
        run_through(CompileAhead(b"job", ("grad",), mark), "grad")
        assert [file.name for file in tmp_path.glob("layers*")] == marks
    monkeypatch.setattr(sys, "executable", "/no such program")
    run_through(CompileAhead(b"job", ("grad",), mark), "grad")
    assert lines(caplog)[-1]["ahead"] == "by an earlier run"
    assert lines(caplog)[-1]["waited_s"] == 0


def test_a_pass_waits_for_no_process_of_the_other_kind_nor_where_none_was_started(ends: threading.Event) -> None:
    for ahead in (CompileAhead(b"", ("grad",)), CompileAhead()):
        run_through(ahead, "no_grad")
    assert not ends.is_set()


def test_a_pass_that_compiles_nothing_does_not_wait_and_is_not_the_first(
    ends: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = CompileAhead(b"", ("no_grad",))
    with uncompiled():
        run_through(ahead, "no_grad")
    assert not lines(caplog)
    ends.set()
    run_through(ahead, "no_grad")
    assert len(lines(caplog)) == 1


def test_updates_are_passes_with_gradients_and_scoring_those_without() -> None:
    class Noted(CompileAhead):
        @contextmanager
        def around(self, name: Pass) -> Iterator[None]:
            seen.append(name)
            yield

    seen: list[Pass] = []
    backend = build_backend("single", tiny_policy(), fsdp=FP32, optim=OPTIM, compiling=Noted())
    batch = tiny_batch()
    backend.forward([batch])
    backend.forward_backward([batch, batch], weighted_nll(total_weight(batch)))
    assert seen == ["no_grad", "grad"]
