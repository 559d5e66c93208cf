"""`dovetail demo`, carried out: what a new user runs first."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.cli.main import main

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(900)
def test_the_demo_trains_two_steps_on_ray_and_says_how_long_it_will_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command in a process of its own, on Ray, with the real model.

    Nothing cheaper shows that the launch list of the demo, the converted model and the before-and-after table fit.
    """
    out = tmp_path / "run"
    small = [
        "data.train_batch_size=2",
        "data.val_max_samples=4",
        "data.max_response_length=4",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    command = [sys.executable, "-m", "dovetail.cli.main", "demo", "--steps", "2", "--out", str(out), *small]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=850)
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
    # The commands that the last lines name work on what was saved: the weights, and nothing that only training needs.
    assert main(["export", str(out), "--list"]) == 0
    [size] = re.findall(r"([\d.]+) MiB", capsys.readouterr().out)
    assert 500 < float(size) < 700
    [command] = [line.partition(": ")[2].strip() for line in lines if "dovetail generate" in line]
    assert main([*shlex.split(command)[1:], "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("> ")
