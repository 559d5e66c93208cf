"""Bypass mode: the engine is the old policy. Weights and rejection are those of the policy in the update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.config.algorithm import RolloutCorrectionConfig
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.update_correction import correction_terms
from tests.trainer.toy_run import Toy, train

pytestmark = pytest.mark.unit

CORRECTION = "algorithm.rollout_correction"
# Log-ratios log 3, log 0.5 and 0 in the first row; log 1.2 and padding in the second.
ENGINE = torch.tensor([[-2.0, -1.0, -1.5], [-1.0, -1.0, 0.0]])
POLICY = ENGINE + torch.tensor([[3.0, 0.5, 1.0], [1.2, 1.0, 1.0]]).log()
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def terms(**settings: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return correction_terms(POLICY, ENGINE, MASK, RolloutCorrectionConfig(bypass_mode=True, **settings))


def test_reinforce_is_weighted_by_policy_over_engine_and_cut() -> None:
    mask, weights = terms(loss_type="reinforce", rollout_is="token", rollout_is_threshold=2.0)
    assert torch.equal(mask, MASK)
    assert weights is not None
    torch.testing.assert_close(weights, torch.tensor([[2.0, 0.5, 1.0], [1.2, 1.0, 0.0]]))
    _, weights = terms(loss_type="reinforce", rollout_is="sequence", rollout_is_threshold=5.0)
    assert weights is not None
    torch.testing.assert_close(weights, torch.tensor([[1.5, 1.5, 1.5], [1.2, 1.2, 0.0]]))


def test_a_clipped_loss_has_its_own_ratio_and_gets_no_weights() -> None:
    assert terms(loss_type="ppo_clip", rollout_is="token")[1] is None
    assert terms(loss_type="reinforce")[1] is None


def test_tokens_far_from_the_engine_are_rejected() -> None:
    # The bounds are of engine over policy.
    mask, _ = terms(rollout_rs="token_k1", rollout_rs_threshold="0.6_1.9")
    assert torch.equal(mask, torch.tensor([[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]))


# ---- runs ----


def run(toy: Toy, folder: Path, changes: dict[str, Any]) -> list[dict[str, Any]]:
    # One optimizer step a batch: the policy of the update is the one that generated.
    keys = {"actor_rollout_ref.actor.ppo_mini_batch_size": 4, "actor_rollout_ref.actor.optim.lr": 1e-4}
    return train(toy.config(folder, {**keys, **changes}))[1]


@pytest.mark.e2e
def test_reinforce_past_the_old_policy_trains_as_ppo_does_while_engine_and_trainer_agree(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = run(toy, tmp_path / "usual", {})
    bypass = {f"{CORRECTION}.bypass_mode": True}
    passes: list[Any] = []
    compute = DataParallelPPOActor.compute_log_prob

    def counted(self: DataParallelPPOActor, *args: Any, **settings: Any) -> Any:
        passes.append(self)
        return compute(self, *args, **settings)

    monkeypatch.setattr(DataParallelPPOActor, "compute_log_prob", counted)
    clipped = run(toy, tmp_path / "clipped", bypass)
    weighted = {**bypass, f"{CORRECTION}.loss_type": "reinforce", f"{CORRECTION}.rollout_is": "token"}
    reinforce = run(toy, tmp_path / "reinforce", weighted)
    assert not passes, "the engine's log-probs are the old ones"
    for rows in (clipped, reinforce):
        assert len(rows) == 3
        for row, expected in zip(rows, usual, strict=True):
            assert row["critic/score/mean"] == expected["critic/score/mean"]
            assert row["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-3)
            assert abs(row["rollout_corr/kl"]) < 1e-4
    # -A log p is another number than -A ratio, with the same gradient.
    assert reinforce[0]["actor/pg_loss"] != pytest.approx(clipped[0]["actor/pg_loss"], abs=1e-3)


@pytest.mark.e2e
def test_a_run_rejects_in_the_update_and_reports_how_much(toy: Toy, tmp_path: Path) -> None:
    keys = {
        f"{CORRECTION}.bypass_mode": True,
        f"{CORRECTION}.rollout_rs": "token_k1",
        f"{CORRECTION}.rollout_rs_threshold": "0.9999_1.0001",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.optim.lr": 1e-2,
    }
    _, rows = train(toy.config(tmp_path, keys))
    # The first mini-batch agrees with the engine; the second meets weights that have moved.
    assert all(0 < row["rollout_corr/rollout_rs_masked_fraction"] <= 1 for row in rows)
