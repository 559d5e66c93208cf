"""A step and a validation of `OfflineTrainer`, with a group that only answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.algorithms.offline.registry import preference_loss
from dovetail.observability.timers import PhaseTimers
from dovetail.protocol import DataProto
from dovetail.trainer.offline import OfflineTrainer

pytestmark = pytest.mark.unit


def trainer_of(group: Any, *, rows_per_example: int = 1, **attributes: Any) -> Any:
    trainer: Any = OfflineTrainer.__new__(OfflineTrainer)
    trainer.config = SimpleNamespace(trainer=SimpleNamespace(balance_batch=True, world_size=2))
    trainer._rows_per_example, trainer._phase, trainer.global_step = rows_per_example, "update_actor", 1
    trainer._groups, trainer.timers = SimpleNamespace(group=group), PhaseTimers()
    trainer.utilisation = SimpleNamespace(of_update=lambda *_: {})
    vars(trainer).update(attributes)
    return trainer


def rows_of(*lengths: int) -> DataProto:
    mask = torch.tensor([[int(at < length) for at in range(max(lengths))] for length in lengths])
    return DataProto.from_dict({"attention_mask": mask, "loss_mask": mask})


@pytest.mark.parametrize(("lengths", "by_rank"), [((9, 3, 2, 1), (5, 10)), ((9,), (0, 9))], ids=["full", "padded"])
def test_tokens_are_counted_by_rank_without_padding(lengths: tuple[int, ...], by_rank: tuple[int, int]) -> None:
    group = SimpleNamespace(dp_size=lambda mesh: 2, update=lambda rows: DataProto(meta_info={"metrics": {}}))
    loader = SimpleNamespace(epoch=0, next_batch=lambda: rows_of(*lengths))
    metrics = trainer_of(group, train_loader=loader)._train_step()
    assert (metrics["global_seqlen/min"], metrics["global_seqlen/max"]) == by_rank
    assert metrics["global_seqlen/minmax_diff"] == by_rank[1] - by_rank[0]
    assert metrics["global_seqlen/mean"] == sum(lengths) / 2


def test_validation_of_kto_is_the_mean_over_the_rows_of_each_label() -> None:
    """Batches of 3 good and 1 bad row, then 1 and 3: each row of a label counts once."""
    totals = iter([{"desirable": 3.0, "undesirable": 1.0}, {"desirable": 1.0, "undesirable": 3.0}])
    metrics = iter([(0.5, 4.0, 0.0), (0.7, 0.0, -4.0)])

    def evaluate(rows: DataProto) -> DataProto:
        loss, chosen, rejected = next(metrics)
        rewards = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
        return DataProto(meta_info={"metrics": {"loss": loss, **rewards}, "totals": next(totals)})

    group = SimpleNamespace(dp_size=lambda mesh: 1, evaluate=evaluate)
    tracker = SimpleNamespace(event=lambda *_, **__: None)
    loader = [rows_of(*[2] * 8), rows_of(*[2] * 8)]
    assert trainer_of(group, rows_per_example=2, val_loader=loader, tracker=tracker)._validate() == {
        "val/loss": pytest.approx(0.6),
        "val/rewards/chosen": 3.0,
        "val/rewards/rejected": -3.0,
        "val/rewards/margins": 6.0,
    }


def test_validation_of_orpo_is_one_pass_over_all_rows_whatever_the_batch() -> None:
    """Chosen responses of 1 and 5 tokens: their cross-entropy is a mean over tokens, their odds one over pairs."""
    orpo = preference_loss("orpo", beta=0.1)
    lengths = torch.tensor([1, 2, 5, 3, 1, 1])
    mask = (torch.arange(5) < lengths[:, None]).long()
    log_probs = torch.linspace(-0.1, -3.0, 30).reshape(6, 5)
    rows = DataProto.from_dict({"attention_mask": mask, "loss_mask": mask, "log_probs": log_probs})

    def evaluate(batch: DataProto) -> DataProto:
        real = batch.select_idxs([row for row in range(len(batch)) if not batch.tensors["is_padding"][row]]).tensors
        totals = orpo.count(real)
        loss, metrics = orpo.share(real["log_probs"], real, totals)
        values = {name: float(value) for name, value in {"loss": loss, **metrics}.items()}
        return DataProto(meta_info={"metrics": values, "totals": totals})

    group = SimpleNamespace(dp_size=lambda mesh: 1, evaluate=evaluate)
    tracker = SimpleNamespace(event=lambda *_, **__: None)
    once, by_pair = (
        trainer_of(group, rows_per_example=2, val_loader=loader, tracker=tracker)._validate()
        for loader in ([rows], rows.split(2))
    )
    assert by_pair == pytest.approx(once)
