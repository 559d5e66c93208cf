"""One update of an actor or a critic on any backend and layout, and what it did, for tests of parity."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dovetail.backends.base import TrainBackend
from dovetail.config.actor import Strategy
from dovetail.config.megatron import MegatronConfig
from dovetail.config.methods import DistillConfig
from dovetail.config.root import DovetailConfig
from dovetail.models.vocabulary_divergence import Teacher, load_output_layer
from dovetail.protocol import DataProto
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.build import build_policy, build_value
from dovetail.workers.critic import DataParallelPPOCritic
from dovetail.workers.micro_batches import MicroBatchLimit
from tests.backends.tiny import as_numpy
from tests.workers.tiny_run import MINI_BATCH, my_rows, run_config, with_old_log_probs

Model = Literal["dense", "moe"]
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"


@dataclass(frozen=True)
class Layout:
    """A way to do the same updates. `rows` and `tokens` cut micro-batches; the critic runs where `critic` says so, a
    student learns from a teacher where `distills` does."""

    world_size: int
    model: Model = "dense"
    strategy: Strategy = "megatron"
    megatron: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Any] = field(default_factory=dict)
    rows: int = 3
    tokens: int | None = None
    critic: bool = False
    distills: bool = False


@dataclass(frozen=True)
class Updated:
    """Log-probs (values) before an update of two optimizer steps, its metrics, and all weights after it."""

    before: np.ndarray
    metrics: dict[str, float]
    weights: dict[str, np.ndarray]


def update_actor(folder: Path, layout: Layout, batch: DataProto) -> Updated:
    """PPO with token-mean, entropy bonus and KL loss."""
    actor = _actor(folder, layout)
    backend = actor.backend
    before = actor.compute_log_prob(_share(batch, backend))[0]
    mine = my_rows(batch, backend.rank_info)
    metrics = actor.update_policy(with_old_log_probs(mine, actor.compute_log_prob(mine)[0]))
    return Updated(_all_rows(before, backend), metrics, as_numpy(backend.named_weights()))


def distill(folder: Path, teacher: Path, layout: Layout, batch: DataProto) -> dict[str, Updated]:
    """A student's updates from a teacher's likely tokens, then from its hidden states; `before` is what it sent."""
    frozen = _actor(teacher, layout, trains=False)
    layer = load_output_layer(str(teacher), dtype=torch.float32, device=torch.device("cpu"))
    student = _actor(folder, layout, teacher=Teacher(layer, "jsd"))
    backend = student.backend
    found = {}
    for kl in ("top_k", "full"):
        mine = my_rows(batch, backend.rank_info)
        if kl == "top_k":
            _, ids, top = frozen.top_tokens(mine, top_k=5, vocab_size=backend.hf_config.vocab_size)
            sent, columns = top, {"teacher_top_ids": ids, "teacher_top_log_probs": top}
        else:
            _, sent = frozen.hidden_states(mine)
            columns = {"teacher_hidden": sent}
        metrics = student.update_policy(
            with_old_log_probs(mine, student.compute_log_prob(mine)[0]).union(DataProto.from_dict(columns))
        )
        found[kl] = Updated(_all_rows(sent, backend), metrics, as_numpy(backend.named_weights()))
    return found


def _actor(
    folder: Path, layout: Layout, *, trains: bool = True, teacher: Teacher | None = None
) -> DataParallelPPOActor:
    policy = _config(folder, layout).actor_rollout_ref
    backend = build_policy(
        policy.model,
        strategy=layout.strategy,
        fsdp=policy.actor.fsdp_config,
        megatron=_megatron(layout),
        optim=policy.actor.optim if trains else None,
        grad_clip=policy.actor.grad_clip,
        world_size=layout.world_size,
        device=torch.device("cpu"),
    )
    return DataParallelPPOActor(
        policy.actor,
        backend,
        mini_batch_rows=MINI_BATCH // backend.rank_info.dp_size,
        log_prob_limit=MicroBatchLimit(rows=layout.rows),
        distill=DistillConfig(kl="top_k"),
        teacher=teacher,
    )


def update_critic(folder: Path, layout: Layout, batch: DataProto) -> Updated:
    config = _config(folder, layout)
    backend = build_value(
        config.critic.model,
        strategy=layout.strategy,
        fsdp=config.critic.fsdp_config,
        megatron=_megatron(layout),
        optim=config.critic.optim,
        grad_clip=config.critic.grad_clip,
        world_size=layout.world_size,
        device=torch.device("cpu"),
    )
    critic = DataParallelPPOCritic(config.critic, backend, mini_batch_rows=MINI_BATCH // backend.rank_info.dp_size)
    before = critic.compute_values(_share(batch, backend))
    metrics = critic.update_critic(my_rows(batch, backend.rank_info))
    return Updated(_all_rows(before, backend), metrics, as_numpy(backend.named_weights()))


def _config(folder: Path, layout: Layout) -> DovetailConfig:
    sizes = {
        "use_dynamic_bsz": layout.tokens is not None,
        "ppo_max_token_len_per_gpu": layout.tokens or 1,
        "ppo_micro_batch_size_per_gpu": layout.rows,
    }
    return run_config(
        folder,
        {
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_coef": 0.1,
            f"{ACTOR}.entropy_coeff": 0.01,
            **{f"{ACTOR}.{key}": value for key, value in sizes.items()},
            **{f"critic.{key}": value for key, value in sizes.items()},
            "critic.forward_max_token_len_per_gpu": layout.tokens or 1,
            **{f"{MODEL}.{key}": value for key, value in layout.network.items()},
        },
    )


def _megatron(layout: Layout) -> MegatronConfig:
    return MegatronConfig(dtype="float32", **layout.megatron)


def _share(batch: DataProto, backend: TrainBackend) -> DataProto:
    return batch.chunk(backend.rank_info.dp_size)[backend.rank_info.dp_rank]


def _all_rows(own: Tensor, backend: TrainBackend) -> np.ndarray:
    """Of the whole batch: `own` is this data-parallel rank's part of it."""
    parts = own.new_zeros(backend.rank_info.dp_size, *own.shape)
    parts[backend.rank_info.dp_rank] = own
    return backend.sum_over_dp(parts).flatten(0, 1).numpy().copy()
