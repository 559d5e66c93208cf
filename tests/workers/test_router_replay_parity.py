"""Recorded and replayed on several ranks: the experts, metrics and weights of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.protocol import DataProto
from dovetail.protocol.routed_experts import ROUTED_EXPERTS
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.build import build_policy
from dovetail.workers.micro_batches import MicroBatchLimit
from tests.backends.tiny import as_numpy
from tests.workers.layouts import ByLayout, BySetting, Layout, assert_same_updates, train_layouts
from tests.workers.tiny_run import MINI_BATCH, Updated, my_rows, rollout_batch, run_config, small_model

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
LAYOUTS = {
    "reference": Layout(1),
    "fsdp2 x2, dynamic, gradient checkpointing": Layout(2, tokens=25, model={"enable_gradient_checkpointing": True}),
    "fsdp x2": Layout(2, "fsdp"),
    "ulysses 2": Layout(2, sp_size=2),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ByLayout:
    return train_layouts(LAYOUTS, train, prepare, tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "reference"])
def test_an_update_that_replays_does_not_depend_on_its_layout(name: str, trained: ByLayout) -> None:
    assert_same_updates(trained[name], trained["reference"][0])
    assert trained["reference"][0]["two epochs"].metrics["actor/routing_changed_share"] > 0


def prepare(rank: int, world_size: int, folder: Path) -> tuple[Path, DataProto]:
    return small_model(folder / "model", "qwen3_moe", num_experts=8), rollout_batch()


def train(folder: Path, layout: Layout, batch: DataProto) -> BySetting:
    changes = {f"{ACTOR}.ppo_epochs": 2, **layout.keys(ACTOR, MODEL)}
    config = run_config(folder, changes).actor_rollout_ref
    backend = build_policy(
        config.model,
        strategy=layout.strategy if layout.world_size > 1 else "single",
        fsdp=config.actor.fsdp_config,
        optim=config.actor.optim,
        sp_size=layout.sp_size,
        world_size=layout.world_size,
        replays_routing=True,
        device=torch.device("cpu"),
    )
    info = backend.rank_info
    limit = MicroBatchLimit(tokens=layout.tokens) if layout.tokens else MicroBatchLimit(rows=layout.micro_batch)
    actor = DataParallelPPOActor(
        config.actor, backend, mini_batch_rows=MINI_BATCH // info.dp_size, log_prob_limit=limit
    )
    mine = my_rows(batch, info)
    scored = actor.score_responses(mine, record_experts=True)
    experts = scored.routed_experts
    assert experts is not None
    lengths = mine.tensors["attention_mask"].sum(1).tolist()
    assert [len(row) for row in experts] == lengths
    noisy = scored.log_probs + mine.tensors["noise"]
    rows = mine.union(DataProto.from_dict({"old_log_probs": noisy}, {ROUTED_EXPERTS: experts}))
    metrics = actor.update_policy(rows)
    used = np.bincount(np.concatenate([row.ravel() for row in experts]), minlength=8)
    total = backend.sum_over_dp(torch.from_numpy(used)).tolist()
    metrics |= {f"experts/{number}": float(count) for number, count in enumerate(total)}
    return {"two epochs": Updated(metrics, as_numpy(backend.named_weights()))}
