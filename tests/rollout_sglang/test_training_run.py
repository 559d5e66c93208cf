"""A whole training run that generates with a real SGLang server: every update reaches it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.tiny import save_tiny_model
from tests.trainer.toy_run import Toy, save_toy_data, train

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_engine_and_trainer_agree_at_every_step_of_a_run(tmp_path: Path) -> None:
    model = save_tiny_model("llama_tied", tmp_path / "model")
    toy = Toy(model, save_toy_data(tmp_path / "data", count=12))
    changes = {
        "actor_rollout_ref.rollout.name": "sglang",
        "actor_rollout_ref.rollout.mode": "server",
        "actor_rollout_ref.rollout.engine_kwargs": {"sglang": {"max_total_tokens": 4096}},
        "actor_rollout_ref.rollout.max_num_seqs": 16,
        "actor_rollout_ref.actor.optim.lr": 1e-2,
    }
    result, metrics = train(toy.config(tmp_path / "run", changes))
    assert result.steps == 3
    # A stale engine would be off by tenths after an update at this rate; float32 kernels differ by rounding.
    assert [row["rollout_corr/probs_diff_max"] < 1e-4 for row in metrics] == [True] * 3
    assert all(row["actor/grad_norm"] > 0 for row in metrics)
