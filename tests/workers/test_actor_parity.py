"""The same batch gives the same metrics, gradient norm and weights, however the update is cut and spread.

One process with micro-batches of 4 is the reference. Every layout runs the same sequence of updates (`SETTINGS`, and
`LOSSES` for some) on one actor, two mini-batches each; after each of them metrics and weights are compared, to 1e-5
(`tiny_run.TOLERANCE` says why).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.protocol import DataProto
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.build import build_policy
from dovetail.workers.micro_batches import MicroBatchLimit
from tests.backends.tiny import as_numpy, largest_difference
from tests.workers.layouts import PADDED, ByLayout, BySetting, Layout, assert_same_updates, slow_on_four, train_layouts
from tests.workers.tiny_run import (
    MINI_BATCH,
    TOLERANCE,
    Updated,
    my_rows,
    rollout_batch,
    run_config,
    small_model,
    with_old_log_probs,
    with_sampling_masks,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"

SETTINGS: dict[str, dict[str, Any]] = {
    "token-mean, two epochs": {"loss_agg_mode": "token-mean", "ppo_epochs": 2},
    "seq-mean-token-sum": {"loss_agg_mode": "seq-mean-token-sum"},
    "token-sum": {"loss_agg_mode": "token-sum"},
    "seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean", "kl_loss_type": "k2"},
    "seq-mean-token-sum-norm": {"loss_agg_mode": "seq-mean-token-sum-norm"},
    "sampling masks": {},
}
LOSSES: dict[str, dict[str, Any]] = {
    "gspo": {"loss_mode": "gspo"},
    "cispo": {"loss_mode": "cispo"},
    "geo_mean": {"loss_mode": "geo_mean"},
    "sapo": {"loss_mode": "sapo"},
    "gpg": {"loss_mode": "gpg"},
    # Shares large enough that several tokens of the mini-batch are chosen, from several ranks.
    "clip_cov": {"loss_mode": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": 0.0},
    "dppo_tv": {"loss_mode": "dppo_tv"},
    "dppo_kl": {"loss_mode": "dppo_kl"},
    "kl_cov": {"loss_mode": "kl_cov", "kl_cov_ratio": 0.3, "ppo_kl_coef": 1.0},
}


LORA = {"lora_rank": 4, "lora_alpha": 8}

LAYOUTS = {
    "reference": Layout(1, losses=True),
    "micro-batches of 1": Layout(1, micro_batch=1),
    "micro-batches of 8": Layout(1, micro_batch=8),
    "dynamic micro-batches": Layout(1, tokens=25),
    "padded": Layout(1, model=PADDED),
    "fused head": Layout(1, model={"use_fused_kernels": True}),
    "padded, fused head": Layout(1, model={**PADDED, "use_fused_kernels": True}),
    "gradient checkpointing": Layout(1, model={"enable_gradient_checkpointing": True}),
    "lora": Layout(1, model=LORA),
    "fsdp2 x2": Layout(2, losses=True),
    "fsdp2 x2, padded, micro-batches of 1": Layout(2, micro_batch=1, model=PADDED),
    "fsdp2 x2, dynamic, fused head, gradient checkpointing": Layout(
        2, tokens=20, model={"use_fused_kernels": True, "enable_gradient_checkpointing": True}
    ),
    "fsdp x2": Layout(2, "fsdp"),
    "fsdp x2, dynamic": Layout(2, "fsdp", tokens=20),
    "ulysses 2": Layout(2, sp_size=2),
    "ulysses 2, dynamic, fused head": Layout(2, sp_size=2, tokens=12, model={"use_fused_kernels": True}, losses=True),
    "lora, fsdp2 x2": Layout(2, model=LORA, like="lora"),
    "fsdp2 x4": Layout(4, micro_batch=2, losses=True),
    "fsdp2 hybrid 2x2": Layout(4, micro_batch=1, fsdp={"fsdp_size": 2}),
    "ulysses 4 over 2 key-value heads": Layout(4, sp_size=4),
    "fsdp2 hybrid 2x2, ulysses 2, dynamic": Layout(4, sp_size=2, tokens=14, fsdp={"fsdp_size": 2}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ByLayout:
    folder = tmp_path_factory.mktemp("trained")
    return train_layouts(LAYOUTS, train, prepare, folder)


def prepare(rank: int, world_size: int, folder: Path) -> tuple[Path, DataProto]:
    return small_model(folder / "model"), rollout_batch()


@pytest.mark.parametrize("name", slow_on_four(LAYOUTS, [n for n in LAYOUTS if n not in ("reference", "lora")]))
def test_an_update_does_not_depend_on_its_layout(name: str, trained: ByLayout) -> None:
    assert_same_updates(trained[name], trained[LAYOUTS[name].like][0])


def test_the_updates_that_are_compared_move_the_weights_and_clip(trained: ByLayout) -> None:
    found = list(trained["reference"][0].values())
    for before, after in pairwise(found):
        assert largest_difference(before.weights, after.weights) > 100 * TOLERANCE
    assert 0.05 < found[0].metrics["actor/pg_clipfrac"] < 0.95
    assert found[0].metrics["actor/kl_loss"] > 0.01
    assert found[0].metrics["actor/grad_norm"] > 0.1
    assert set(SETTINGS) | set(LOSSES) == set(trained["reference"][0])


def train(folder: Path, layout: Layout, batch: DataProto) -> BySetting:
    actor = build_actor(folder, layout, {})
    mine = my_rows(batch, actor.backend.rank_info)
    settings = {**SETTINGS, **({name: {"policy_loss": loss} for name, loss in LOSSES.items()} if layout.losses else {})}
    found: BySetting = {}
    for name, setting in settings.items():
        actor = build_actor(folder, layout, setting, like=actor)
        rows = with_sampling_masks(mine) if name == "sampling masks" else mine
        # Anew each time: far from its old log-probs a policy is clipped everywhere, and nothing would be compared.
        metrics = actor.update_policy(with_old_log_probs(rows, actor.compute_log_prob(rows)[0]))
        found[name] = Updated(metrics, as_numpy(actor.backend.named_weights()))
    return found


def build_actor(
    folder: Path, layout: Layout, setting: dict[str, Any], *, like: DataParallelPPOActor | None = None
) -> DataParallelPPOActor:
    """A new actor, or one with another loss on the backend of `like`."""
    changes: dict[str, Any] = {
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": 0.1,
        f"{ACTOR}.entropy_coeff": 0.01,
        **layout.keys(ACTOR, MODEL),
        **{f"{ACTOR}.{key}": value for key, value in setting.items()},
    }
    config = run_config(folder, changes)
    policy = config.actor_rollout_ref
    backend = like.backend if like is not None else build_policy(
        policy.model, strategy=layout.strategy, fsdp=policy.actor.fsdp_config, optim=policy.actor.optim,
        grad_clip=policy.actor.grad_clip, sp_size=layout.sp_size, world_size=layout.world_size,
        device=torch.device("cpu"),
    )  # fmt: skip
    return DataParallelPPOActor(
        policy.actor,
        backend,
        mini_batch_rows=MINI_BATCH // backend.rank_info.dp_size,
        log_prob_limit=MicroBatchLimit(rows=layout.micro_batch),
        loss_scale_factor=config.loss_scale_factor,
    )
