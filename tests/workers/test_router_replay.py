"""The actor with recorded experts: they keep to their rows, through micro-batches, mini-batches and the update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.protocol import DataProto
from dovetail.protocol.routed_experts import ROUTED_EXPERTS
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.build import build_policy
from dovetail.workers.micro_batches import MicroBatchLimit
from tests.workers.tiny_run import MINI_BATCH, rollout_batch, run_config, small_model

pytestmark = pytest.mark.unit

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", num_experts=8)


def build(folder: Path, *, limit: MicroBatchLimit | None = None, **changes: Any) -> DataParallelPPOActor:
    """Two mini-batches; `changes` are keys of `actor`, or of `model` when they start with `model_`."""
    sections = {
        f"{MODEL}.{key.removeprefix('model_')}" if key.startswith("model_") else f"{ACTOR}.{key}": value
        for key, value in changes.items()
    }
    policy = run_config(folder, sections).actor_rollout_ref
    backend = build_policy(
        policy.model,
        strategy="single",
        fsdp=policy.actor.fsdp_config,
        optim=policy.actor.optim,
        replays_routing=True,
        device=torch.device("cpu"),
    )
    return DataParallelPPOActor(
        policy.actor, backend, mini_batch_rows=MINI_BATCH, log_prob_limit=limit or MicroBatchLimit(rows=4)
    )


def scored(actor: DataParallelPPOActor, batch: DataProto) -> DataProto:
    result = actor.score_responses(batch, record_experts=True)
    assert result.routed_experts is not None
    columns = {"old_log_probs": result.log_probs}
    return batch.select().union(DataProto.from_dict(columns, {ROUTED_EXPERTS: result.routed_experts}))


def test_the_record_of_a_row_is_its_own_however_rows_are_cut(folder: Path) -> None:
    batch = rollout_batch()
    alone = scored(build(folder, limit=MicroBatchLimit(rows=1)), batch)
    lengths = batch.tensors["attention_mask"].sum(1).tolist()
    assert [row.shape for row in alone.non_tensor_batch[ROUTED_EXPERTS]] == [(length, 2, 2) for length in lengths]
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    limit = MicroBatchLimit(tokens=30)  # of rows that are similar in length
    for settings in ({}, {"model_use_remove_padding": False}):
        shuffled = scored(build(folder, limit=limit, **settings), batch.select_idxs(order))
        for row, source in enumerate(order.tolist()):
            expected = alone.non_tensor_batch[ROUTED_EXPERTS][source]
            assert np.array_equal(shuffled.non_tensor_batch[ROUTED_EXPERTS][row], expected)


def test_rows_replay_their_own_experts_in_any_order(folder: Path) -> None:
    other = build(folder)
    other.update_policy(scored(other, rollout_batch()))  # other weights
    batch = scored(other, rollout_batch())
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    for limit in (MicroBatchLimit(rows=3), MicroBatchLimit(tokens=25)):
        actor = build(folder, limit=limit)
        replayed = actor.score_responses(batch.select_idxs(order)).log_probs
        torch.testing.assert_close(replayed, build(folder).score_responses(batch).log_probs[order], atol=1e-5, rtol=0)
        again = actor.score_responses(batch.select_idxs(order), record_experts=True).routed_experts
        assert again is not None
        for row, source in enumerate(order.tolist()):
            assert np.array_equal(again[row], batch.non_tensor_batch[ROUTED_EXPERTS][source])


def test_an_update_replays_in_every_step_and_recomputed_layers_too(folder: Path) -> None:
    found = []
    for checkpointing in (False, True):
        changes = {"model_enable_gradient_checkpointing": checkpointing, "optim": {"lr": 3e-2, "eps": 1e-3}}
        actor = build(folder, **changes)
        metrics = actor.update_policy(scored(actor, rollout_batch()))
        weights = {name: weight.clone() for name, weight in actor.backend.named_weights()}
        found.append((metrics, weights))
    (kept, kept_weights), (recomputed, recomputed_weights) = found
    assert 0 < kept["actor/routing_changed_share"] < 1
    assert recomputed["actor/routing_changed_share"] == kept["actor/routing_changed_share"]
    for name, weight in kept_weights.items():
        torch.testing.assert_close(recomputed_weights[name], weight, atol=1e-6, rtol=0)


def test_at_unchanged_weights_an_update_that_replays_is_the_plain_one(folder: Path) -> None:
    batch = rollout_batch().select_idxs(list(range(MINI_BATCH)))
    results = []
    for replays in (True, False):
        actor = build(folder)
        rows = scored(actor, batch)
        rows = rows if replays else rows.select(non_tensor_batch_keys=[])
        metrics = actor.update_policy(rows)
        results.append((metrics, {name: weight.clone() for name, weight in actor.backend.named_weights()}))
    (replayed, weights), (plain, expected) = results
    assert replayed.pop("actor/routing_changed_share") == 0
    assert replayed == plain
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
