"""A step and a validation of `OfflineTrainer`, with a group that only answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.algorithms.offline.registry import OfflineLoss, preference_loss
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


class Scored:
    """A group whose rows bring their log-probs along."""

    def __init__(self, loss: OfflineLoss) -> None:
        self.loss = loss

    def dp_size(self, mesh: str) -> int:
        return 1

    def totals(self, batch: DataProto) -> DataProto:
        rows = batch.tensors
        totals = self.loss.count(rows)
        if self.loss.baseline is not None:
            others = {name: column[1::2] for name, column in rows.items()}
            totals |= self.loss.baseline(others["log_probs"], others)
        return DataProto(meta_info={"metrics": totals})

    def evaluate(self, batch: DataProto, totals: dict[str, float]) -> DataProto:
        step = 1 if self.loss.baseline is None else self.loss.rows_per_example
        rows = {name: column[::step] for name, column in batch.tensors.items()}
        loss, metrics = self.loss.share(rows["log_probs"], rows, totals)
        return DataProto(
            meta_info={"metrics": {name: float(value) for name, value in {"loss": loss, **metrics}.items()}}
        )


def validated(loss: OfflineLoss, rows: DataProto, batch_size: int) -> dict[str, float]:
    return trainer_of(
        Scored(loss),
        rows_per_example=2,
        val_loader=rows.split(batch_size),
        tracker=SimpleNamespace(event=lambda *_, **__: None),
    )._validate()


@pytest.mark.parametrize("loss_type", ["orpo", "kto"])
def test_validation_is_one_pass_over_all_rows_whatever_the_batch(loss_type: str) -> None:
    """Chosen responses of 1 and 5 tokens: ORPO's cross-entropy is a mean over tokens, its odds one over pairs. KTO's
    rewards are means over the rows of a label, and its baseline, held at 0 or above, is one for all rows."""
    loss = preference_loss(loss_type, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0)
    lengths = torch.tensor([1, 2, 5, 3, 1, 1])
    mask = (torch.arange(5) < lengths[:, None]).long()
    columns = {
        "attention_mask": mask,
        "loss_mask": mask,
        "log_probs": torch.linspace(-0.1, -3.0, 30).reshape(6, 5),
        "ref_log_prob_sum": torch.tensor([-1.0, -3.0, -9.0, -9.0, -2.0, -1.0]),
        "desirable": torch.tensor([1, 1, 1, 1, 0, 0]),
    }
    rows = DataProto.from_dict(columns)
    once = validated(loss, rows, 6)
    assert validated(loss, rows, 2) == pytest.approx(once)
    assert validated(loss, rows, 4) == pytest.approx(once)
    if loss_type == "kto":
        mismatched = (mask * columns["log_probs"]).sum(dim=1)[1::2] - columns["ref_log_prob_sum"][1::2]
        assert once["val/kl"] == pytest.approx(float(mismatched.mean()))
        assert (mismatched < 0).any()
        assert once["val/rewards/margins"] == pytest.approx(once["val/rewards/chosen"] - once["val/rewards/rejected"])
