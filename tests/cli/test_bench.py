"""`dovetail bench` measures the run's own phases, on a model of its own when none is given."""

from __future__ import annotations

import re

import pytest

from dovetail.cli.main import main

pytestmark = pytest.mark.e2e

TINY = (
    "data.train_batch_size=2",
    "data.max_prompt_length=8",
    "data.max_response_length=8",
    "actor_rollout_ref.rollout.n=2",
    "trainer.device=cpu",
)


def test_bench_alone_measures_generation_and_update(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--steps", "1", "actor_rollout_ref.actor.ppo_mini_batch_size=2", *TINY]) == 0
    text = capsys.readouterr().out
    for phase in ("rollout", "actor update"):
        [words] = re.findall(rf"{phase}[ │]+([\d.,]+)[ │]+([\d.,]+)", text)
        seconds, rate = (float(word.replace(",", "")) for word in words)
        tokens = 2 * 2 * (8 if phase == "rollout" else 16)
        # Both are printed rounded: seconds to a thousandth, the rate to a whole token.
        assert tokens / (seconds + 0.0005) - 0.5 <= rate <= tokens / (seconds - 0.0005) + 0.5
    assert "old log-probs" not in text


def test_bench_measures_old_log_probs_where_a_step_has_several_updates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--steps", "1", "actor_rollout_ref.actor.ppo_mini_batch_size=1", *TINY]) == 0
    text = capsys.readouterr().out
    for phase in ("rollout", "old log-probs", "actor update"):
        *_, planned = re.findall(r"[\d.,]+|-", next(line for line in text.splitlines() if phase in line))
        assert float(planned) > 0, f"what the plan foresees for {phase}"


def test_bench_refuses_a_wrong_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "actor_rollout_ref.rollout.temprature=1"]) == 2
    assert "temperature" in capsys.readouterr().err
