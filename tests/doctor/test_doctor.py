"""`dovetail doctor`: finds a sound installation sound, and names what is missing or wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.cli import doctor
from dovetail.cli.main import main
from dovetail.config import installed
from dovetail.config.load import load_config
from dovetail.doctor.agreement import LogProbDiffs
from dovetail.rollout.native.engine import NativeEngine
from dovetail.workers.parity import PASS_MARKS

pytestmark = pytest.mark.engine

R = "actor_rollout_ref.rollout"


@pytest.fixture
def no_demo_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the extra `demo`: the random model is used."""
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("no_demo_package")
def test_without_a_configuration_a_sound_machine_is_healthy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "doctor.svg"
    assert main(["doctor", "--svg", str(picture)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "This machine",
        f"torch {torch.__version__}",
        "rollout.name=native",
        "a random model of two layers",
        "train one step",
        "healthy: what this run needs is here, and engine and trainer agree",
        "an engine that missed the training step would be off by",
    ):
        assert words in shown
    assert "<svg" in picture.read_text()
    assert "cdn" not in picture.read_text(), "the picture needs no internet"


@pytest.mark.usefixtures("no_demo_package")
def test_an_engine_that_misses_the_training_step_is_not_healthy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = NativeEngine.update_weights

    def stale(self: NativeEngine, weights: Any, version: int) -> None:
        if version == 1:
            original(self, weights, version)
        elif weights is not None:  # takes everything and keeps nothing
            list(weights)
            self._partial_update = ""

    monkeypatch.setattr(NativeEngine, "update_weights", stale)
    # bfloat16 weights of a float32 trainer are the engine's own.
    arguments = [f"{R}.free_cache_engine=False", f"{R}.dtype=bfloat16"]
    assert main(["doctor", *arguments]) == 1
    shown = capsys.readouterr().out
    assert "Failed at: sync again, generate, compare" in shown
    assert "compared tensors differ in the native engine" in " ".join(shown.split())
    assert "not healthy" in shown


def test_a_missing_engine_is_named_with_what_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = installed._version
    monkeypatch.delenv("DOVETAIL_SGLANG_PYTHON", raising=False)
    monkeypatch.setattr(installed, "_version", lambda name: None if name == "sglang" else version(name))
    assert main(["doctor", f"{R}.name=sglang"]) == 1
    shown = capsys.readouterr().out
    assert "sglang: pip install 'dovetail[sglang]'" in shown
    assert "train one step" not in shown


def test_a_version_out_of_range_is_told_with_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(overrides=[f"{R}.name=vllm"]).config
    version = installed._version
    monkeypatch.setattr(installed, "_version", lambda name: "0.99.0" if name == "vllm" else version(name))
    (part,) = [part for part in installed.installed_parts(config) if part.name == "vllm"]
    assert part.status == "unsupported"
    assert part.failed
    assert "0.99.0" in part.version
    assert "0.33" in part.version


def test_only_what_the_run_uses_is_needed() -> None:
    config = load_config(overrides=["actor_rollout_ref.model.lora_rank=8"]).config
    needed = {part.name for part in installed.installed_parts(config) if part.needed}
    assert needed == {"native", "torch", "lora"}


def test_a_configuration_that_cannot_be_read_or_run_is_shown_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", f"{R}.temprature=1"]) == 1
    assert "temperature" in capsys.readouterr().out
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("actor_rollout_ref:\n  rollout:\n    n: 4\n    do_sample: false\n")
    assert main(["doctor", str(recipe)]) == 1
    shown = capsys.readouterr().out
    assert "The configuration cannot run" in shown
    assert "do_sample" in shown


def test_no_run_only_looks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-run"]) == 0
    assert "train one step" not in capsys.readouterr().out


def test_sampled_gaps_are_counted_by_power_of_ten_and_held_to_the_mark() -> None:
    mark = PASS_MARKS["float32"]
    gaps = LogProbDiffs(torch.tensor([0.0, 3e-6, 5e-6, 2e-4]), 0.1, mark)
    assert gaps.decades() == [(None, 1), (-6, 2), (-5, 0), (-4, 1)]
    assert gaps.passed
    assert gaps.tells
    assert not LogProbDiffs(torch.tensor([2e-4]), 1e-5, mark).passed
    assert not LogProbDiffs(torch.tensor([float("nan")]), 0.1, mark).passed
    assert not LogProbDiffs(torch.tensor([1e-5]), 1e-5, mark).tells
    assert not LogProbDiffs(torch.tensor([0.0]), 0.0, mark).tells


def test_a_small_step_tells_when_the_gap_is_far_smaller_still() -> None:
    """A step of adapters in bfloat16, whose mark is far above it: the engine is off by less, or by all of it."""
    mark = PASS_MARKS["bfloat16"]
    assert LogProbDiffs(torch.tensor([0.002]), 0.03, mark).tells
    stale = LogProbDiffs(torch.tensor([0.03]), 0.03, mark)
    assert stale.passed
    assert not stale.tells
