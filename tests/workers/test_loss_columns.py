"""A policy loss gets the columns it asked for; batches arrive narrow and are read as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.algorithms import agg_loss, get_policy_loss_columns, register_policy_loss, registry
from dovetail.protocol import DataProto
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.micro_batches import MicroBatchLimit
from tests.workers.test_actor import build
from tests.workers.tiny_run import NUM_ROWS, rollout_batch, small_model, with_old_log_probs

pytestmark = pytest.mark.unit

SEEN: list[dict[str, Any]] = []


def row_weighted(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    row_weights: torch.Tensor,
    uid: np.ndarray,
    counts: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    SEEN.append({"row_weights": row_weights, "uid": list(uid), "mask": response_mask})
    return agg_loss(-advantages * log_prob * row_weights[:, None], response_mask, counts=counts), {}


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """For these tests alone: others compare the registry with the documents."""
    for table in ("_POLICY_LOSSES", "_LOSS_COLUMNS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    register_policy_loss("row_weighted", columns=["row_weights", "uid"])(row_weighted)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("policy"))


def narrow(batch: DataProto) -> DataProto:
    """As engines write it."""
    kinds = {"attention_mask": torch.int8, "response_mask": torch.int8}
    tensors = {
        name: column.to(kinds.get(name, torch.int32)) if column.dtype == torch.int64 else column
        for name, column in batch.tensors.items()
    }
    return DataProto.from_dict(tensors, batch.non_tensor_batch, batch.meta_info)


def asking(folder: Path) -> DataParallelPPOActor:
    plain = build(folder)
    loss = plain.config.policy_loss.model_copy(update={"loss_mode": "row_weighted"})
    config = plain.config.model_copy(update={"policy_loss": loss})
    limit = MicroBatchLimit(rows=4)
    return DataParallelPPOActor(config, plain.backend, mini_batch_rows=NUM_ROWS, log_prob_limit=limit)


def ready(actor: DataParallelPPOActor) -> DataProto:
    batch = rollout_batch()
    return with_old_log_probs(batch, actor.compute_log_prob(batch)[0])


def test_a_loss_gets_the_columns_it_asked_for(folder: Path) -> None:
    actor = asking(folder)
    assert get_policy_loss_columns("row_weighted") == ("row_weights", "uid")
    batch = ready(actor)
    batch.union(DataProto.from_dict({"row_weights": torch.arange(NUM_ROWS).float()}))
    batch.non_tensor_batch["uid"] = np.array([str(row) for row in range(NUM_ROWS)], dtype=object)
    SEEN.clear()
    actor.update_policy(narrow(batch))
    assert sorted(torch.cat([call["row_weights"] for call in SEEN]).tolist()) == list(range(NUM_ROWS))
    assert sorted(uid for call in SEEN for uid in call["uid"]) == sorted(batch.non_tensor_batch["uid"])
    assert {call["mask"].dtype for call in SEEN} == {torch.int64}


def test_a_column_that_the_batch_does_not_have_is_named(folder: Path) -> None:
    actor = asking(folder)
    with pytest.raises(ValueError, match="has no column row_weights, uid"):
        actor.update_policy(ready(actor))


def test_narrow_columns_train_the_same_weights_to_the_bit(folder: Path) -> None:
    results = []
    for change in (lambda batch: batch, narrow):
        actor = build(folder)
        metrics = actor.update_policy(change(ready(actor)))
        results.append((metrics, dict(actor.backend.named_weights())))
    (plain, weights), (same, narrow_weights) = results
    assert plain == same
    assert all(torch.equal(weights[name], narrow_weights[name]) for name in weights)
