"""Runs that are scored by a reward network, alone and beside a rule, in training and in validation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.protocol import DataProto
from dovetail.rewards.runner import PendingRewards, RewardResult
from dovetail.trainer.ppo import Metrics, RayPPOTrainer
from dovetail.trainer.run import run_training
from tests.trainer.toy_run import Toy
from tests.workers.tiny_run import FP32, save_classifier

pytestmark = pytest.mark.e2e


class KeepingTrainer(RayPPOTrainer):
    """Keeps the scored batches, validation's first."""

    kept: list[DataProto]

    def _start_rewards(self, batch: DataProto, *, shaped: bool = True, started: Any = None) -> PendingRewards:
        pending = super()._start_rewards(batch, shaped=shaped, started=started)
        if not shaped:
            self.kept.append(batch.union(pending.result().columns))
        return pending

    def _take_rewards(self, batch: DataProto, rewards: PendingRewards | RewardResult, metrics: Metrics) -> DataProto:
        found = super()._take_rewards(batch, rewards, metrics)
        self.kept.append(found)
        return found


@torch.no_grad()
def transformers_scores(folder: Path, batch: DataProto) -> list[float]:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    columns = batch.tensors
    pairs = zip(columns["input_ids"], columns["attention_mask"].bool(), strict=True)
    return [float(model(input_ids=ids[kept][None]).logits) for ids, kept in pairs]


@pytest.mark.parametrize("rule", [False, True], ids=["alone", "beside a rule"])
def test_answers_are_scored_by_the_network_in_training_and_validation(toy: Toy, tmp_path: Path, rule: bool) -> None:
    network = save_classifier(tmp_path / "reward")
    keys: dict[str, Any] = {
        "reward_model.enable": True,
        "reward_model.model.path": str(network),
        "reward_model.model.input_tokenizer": None,  # the network reads the policy's tokens
        "reward_model.model.fsdp_config": FP32,
        "reward_model.reward_kwargs": {"rm_weight": 0.5} if rule else {},
        "data.val_files": str(toy.data / "val.parquet"),
        "trainer.val_before_train": True,
        "trainer.total_training_steps": 1,
    }
    keys |= {} if rule else {"custom_reward_function.path": None}
    KeepingTrainer.kept = []
    result = run_training(toy.config(tmp_path / "run", keys), use_ray=False, trainer_class=KeepingTrainer)
    assert result.steps == 1
    assert [len(batch) for batch in KeepingTrainer.kept] == [4, 16, 4]
    for batch in KeepingTrainer.kept:
        found = batch.tensors["token_level_scores"].sum(dim=1)
        expected = torch.tensor(transformers_scores(network, batch))
        if rule:  # what is left is the share of ASCII characters
            shares = found - 0.5 * expected
            assert ((shares > -1e-4) & (shares < 1 + 1e-4)).all()
            assert shares.max() > 0.1 or len(batch) == 4, "greedy answers of the untrained model hold none"
        else:
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    rows = [json.loads(line) for line in (tmp_path / "run" / "validation" / "step_1.jsonl").read_text().splitlines()]
    written = [row["values"]["reward"] for row in rows]
    assert written == pytest.approx(KeepingTrainer.kept[-1].tensors["token_level_scores"].sum(dim=1).tolist())
    assert result.validation["val-core/toy/reward/mean@1"] == pytest.approx(sum(written) / 4, abs=1e-6)
