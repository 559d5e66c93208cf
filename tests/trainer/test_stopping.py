"""SIGTERM and SIGINT: the run ends after the phase, with a checkpoint; a resumed run repeats and loses nothing."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint.store import CheckpointStore
from dovetail.config.root import DovetailConfig
from dovetail.observability.console import StepConsole
from dovetail.observability.run_folder import NOW, RunFolder
from dovetail.trainer.checkpoints import TrainerCheckpoints
from dovetail.trainer.run import RunResult, run_training, stopped_message
from dovetail.trainer.stopping import Interrupted, StopRequest, resume_line
from tests.trainer import toy_run
from tests.trainer.toy_run import DAPO, Toy, repeatable, train

e2e, unit = pytest.mark.e2e, pytest.mark.unit


class Signals(StepConsole):
    """A console that sends this process signals when a phase of a step begins: consoles are told about phases."""

    def __init__(self, phase: str, step: int, *signals: int) -> None:
        self._phase, self._step, self._signals = phase, step, signals
        self._steps_begun = 0

    def phase(self, name: str | None) -> None:
        self._steps_begun += name == "gen"
        if name == self._phase and self._steps_begun == self._step:
            for number in self._signals:
                signal.raise_signal(number)  # to this thread: what `os.kill` sends, another one may take, and later


def _run(config: DovetailConfig, phase: str, step: int, *signals: int) -> RunResult:
    return run_training(config, use_ray=False, console=lambda title, total: Signals(phase, step, *signals))


@e2e
def test_a_step_whose_groups_are_noted_as_trained_is_not_given_up(toy: Toy, tmp_path: Path) -> None:
    """Also where it updates nothing: given up, it would lose these groups."""
    changes = {"async_training.mode": "fully_async", "trainer.critic_warmup": 2}
    assert _run(toy.config(tmp_path, changes), "weight_sync", 1, signal.SIGTERM).steps == 1


@e2e
@pytest.mark.parametrize(
    ("changes", "phase", "last"),
    [
        pytest.param({}, "gen", 1, id="plain, gen"),
        pytest.param({}, "update_actor", 2, id="plain, update", marks=pytest.mark.slow),
        pytest.param(DAPO, "gen", 1, id="dynamic sampling, gen", marks=pytest.mark.slow),
        pytest.param(DAPO, "update_actor", 2, id="dynamic sampling, update"),
    ],
)
def test_a_run_that_was_asked_to_end_goes_on_as_if_it_had_not_been(
    toy: Toy, tmp_path: Path, changes: dict[str, Any], phase: str, last: int
) -> None:
    """Before an update the step is given up and done again; once one has begun it is finished first."""
    _, expected = train(toy.config(tmp_path / "whole", changes))
    config = toy.config(tmp_path / "run", changes)
    result = _run(config, phase, 2, signal.SIGTERM)
    assert (result.steps, result.stopped_by) == (last, signal.SIGTERM)
    latest = CheckpointStore(tmp_path / "run").latest()
    assert latest == tmp_path / "run" / f"global_step_{last}"
    assert f"SIGTERM: stopped after step {last}; its checkpoint is {latest}. Go on with:" in stopped_message(
        result, config
    )
    resumed, rows = train(config)
    assert (resumed.steps, resumed.stopped_by) == (3, None)
    assert repeatable(rows) == repeatable(expected)


@e2e
def test_a_second_signal_ends_the_run_at_once(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(Interrupted) as caught:
        _run(toy.config(tmp_path / "run"), "gen", 2, signal.SIGTERM, signal.SIGINT)
    assert caught.value.signum == signal.SIGINT
    assert CheckpointStore(tmp_path / "run").latest() is None
    assert RunFolder(tmp_path / "run").read_metrics()[-1]["step"] == 1


@e2e
def test_a_checkpoint_that_fails_after_a_signal_is_the_place_of_the_failure_and_not_the_step_given_up(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("the file server is gone")

    monkeypatch.setattr(TrainerCheckpoints, "save", fails)
    with pytest.raises(RuntimeError, match="the file server is gone"):
        _run(toy.config(tmp_path / "run"), "gen", 2, signal.SIGTERM)
    failed = json.loads((tmp_path / "run" / NOW).read_text())["failed"]
    assert failed == "It failed in phase 'save_checkpoint' of step 1: the file server is gone"


@e2e
def test_a_signal_while_the_last_checkpoint_is_still_written_does_not_lose_it(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = TrainerCheckpoints.finish

    def interrupted(checkpoints: TrainerCheckpoints) -> list[int]:
        if checkpoints._open is not None:
            signal.raise_signal(signal.SIGTERM)
        return finish(checkpoints)

    monkeypatch.setattr(TrainerCheckpoints, "finish", interrupted)
    monkeypatch.setattr(TrainerCheckpoints, "poll", lambda _: [])
    keys = {"trainer.save_freq": 3, "actor_rollout_ref.actor.checkpoint.async_save": True}
    result = run_training(toy.config(tmp_path / "run", keys), use_ray=False)
    assert (result.steps, result.stopped_by) == (3, signal.SIGTERM)
    assert CheckpointStore(tmp_path / "run").latest() == tmp_path / "run" / "global_step_3"


@e2e
def test_a_signal_from_outside_ends_the_tests_and_fails_none_of_them(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        toy_run, "run_training", lambda config, use_ray: _run(config, "update_actor", 1, signal.SIGTERM)
    )
    with pytest.raises(pytest.exit.Exception, match="signal 15, which came from outside"):
        train(toy.config(tmp_path / "run"))


@unit
def test_a_signal_before_training_ends_at_once_and_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopRequest()
    with pytest.raises(Interrupted), stop.listening():
        signal.raise_signal(signal.SIGTERM)
    assert stop.name is None
    assert signal.getsignal(signal.SIGTERM) is before


@unit
def test_the_line_that_resumes_is_the_command_and_really_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/bin/dovetail", "train", "a b.yaml", "trainer.resume_mode=disable"])
    assert resume_line() == "dovetail train 'a b.yaml' trainer.resume_mode=disable"
    assert resume_line(resume_mode="disable") == "dovetail train 'a b.yaml' trainer.resume_mode=auto"
