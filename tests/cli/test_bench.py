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
    # On a CPU without instructions for it, bfloat16 takes hundreds of times as long.
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32",
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


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("mini_batch", "keys", "is_measured"),
    [
        (2, (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=2"), True),
        (1, (f"{CORRECTION}.bypass_mode=True",), False),
    ],
    ids=["corrected", "bypassed"],
)
def test_bench_measures_old_log_probs_where_the_run_would_compute_them(
    capsys: pytest.CaptureFixture[str], mini_batch: int, keys: tuple[str, ...], is_measured: bool
) -> None:
    more = (
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
    )
    assert main(["bench", "--steps", "1", *more, *keys, *TINY]) == 0
    assert ("old log-probs" in capsys.readouterr().out) == is_measured


def test_bench_refuses_a_wrong_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "actor_rollout_ref.rollout.temprature=1"]) == 2
    assert "temperature" in capsys.readouterr().err
