"""`dovetail demo`, carried out: what a new user runs first."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from dovetail.agents import Task
from dovetail.cli.main import main
from dovetail.demo import smollm2
from dovetail.demo.calculator import Calculator
from tests.programs import run_program
from tests.ray_workers import quick_workers
from tests.trainer.toy_run import save_toy_model

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(900)
def test_the_demo_trains_two_steps_on_ray_and_says_how_long_it_will_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command in a process of its own, on Ray, with the real model. Its processes come from a fork server.

    Nothing cheaper shows that the launch list of the demo, the converted model and the before-and-after table fit.
    """
    out = tmp_path / "run"
    small = [
        "data.train_batch_size=2",
        "data.val_max_samples=4",
        "data.max_response_length=4",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"ray_init.runtime_env.py_executable={quick_workers()['py_executable']}",
    ]
    words = ["dovetail", "demo", "--steps", "2", "--out", str(out), *small]
    run = run_program(words, cwd=tmp_path, env=os.environ, timeout=850)
    assert run.returncode == 0, run.stdout
    lines = run.stdout.splitlines()
    assert "2 steps of GRPO on the CPU of this machine" in lines[0]
    assert "after the first step" in lines[1]
    (estimate,) = [place for place, line in enumerate(lines) if "time left: about" in line]
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


def test_the_demo_of_an_agent_trains_two_steps_and_shows_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a random model of bytes, which calls nothing: that SmolLM2 learns to is a run of minutes (docs/results.md)."""
    model = save_toy_model(tmp_path / "model")
    monkeypatch.setattr(smollm2, "smollm2_folder", lambda: model)
    small = [
        "data.train_batch_size=2",
        "data.val_max_samples=4",
        "data.max_prompt_length=320",
        "data.max_response_length=16",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.logger=[file]",
    ]
    out = tmp_path / "run"
    assert main(["demo", "--agent", "--local", "--steps", "2", "--out", str(out), *small]) == 0
    said = capsys.readouterr().out
    assert "learns to ask a calculator: 2 steps of GRPO" in said
    assert "Accuracy on 4 held-out problems" in said
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["num_turns/mean"] for row in steps if "actor/grad_norm" in row] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("turns", "told", "reward"),
    [
        (["12 * 34 =", "408"], "408", 1.0),
        (["12*34=", "It is 408."], "408", 1.0),
        (["12*34=", "12*34="], "408", 0.0),
        (["12*=", "408"], "Error", 1.0),
        (["12*34=407"], "", 0.0),
        (["408"], "", 1.0),
    ],
)
def test_the_calculator_of_the_agents_demo_is_asked_once_and_the_answer_is_scored(
    turns: list[str], told: str, reward: float
) -> None:
    game = Calculator()
    game.reset(Task([], {"reward_model": {"ground_truth": "408"}}))
    steps = [game.step(turn) for turn in turns]
    assert told in steps[0].observation
    assert [step.done for step in steps] == [False] * (len(turns) - 1) + [True]
    assert steps[-1].reward == reward
