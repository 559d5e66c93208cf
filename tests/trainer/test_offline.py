"""A step and a validation of `OfflineTrainer`, with a group that only answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
