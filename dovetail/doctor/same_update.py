"""One policy update on many devices must be the update of one process: log-probs before and after, gradient norm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dovetail.config.root import DovetailConfig
from dovetail.controller import WorkerGroup
from dovetail.doctor.agreement import OVERRIDES, train_once
from dovetail.protocol import DataProto
from dovetail.rollout.assemble import Response, assemble
from dovetail.trainer.groups import create_groups

_PROMPT, _RESPONSE = 12, 16
TOLERANCE = 1e-3
"""Of the gradient norm, relative, and of log-probs, in nats: float32 sums in another order differ by less than 1e-4."""


def overrides(num_rows: int) -> tuple[str, ...]:
    """A configuration whose update is one optimizer step over `num_rows` rows."""
    return (
        *OVERRIDES,
        f"data.train_batch_size={num_rows}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={num_rows}",
        "actor_rollout_ref.rollout.n=1",
    )


@dataclass(frozen=True)
class Update:
    """What an update of the fixed batch did."""

    before: Tensor
    after: Tensor
    grad_norm: float

    def difference(self, other: Update) -> float:
        """The largest of the three differences, in units of `TOLERANCE`."""
        norm = abs(self.grad_norm - other.grad_norm) / max(other.grad_norm, 1e-12)
        logs = max(float((a - b).abs().max()) for a, b in ((self.before, other.before), (self.after, other.after)))
        return max(norm, logs) / TOLERANCE

    @property
    def moved(self) -> float:
        return float((self.after - self.before).abs().mean())


def update_once(config: DovetailConfig, *, use_ray: bool, use_gpu: bool) -> Update:
    """Build the actor, train one step on the fixed batch, measure, shut down."""
    groups = create_groups(config, use_ray=use_ray, use_gpu=use_gpu)
    try:
        groups.init_policy(1)
        return _update(groups.actor_rollout, config.data.train_batch_size)
    finally:
        groups.shutdown()


def _update(policy: WorkerGroup, num_rows: int) -> Update:
    batch = _fixed_batch(num_rows)
    mask = batch.tensors["response_mask"]
    before = policy.compute_log_prob(batch).tensors["old_log_probs"]
    signs = 1.0 - 1.5 * (torch.arange(num_rows) % 2)[:, None]  # advantages of both signs
    metrics = train_once(policy, batch, before, signs * mask)
    after = policy.compute_log_prob(batch).tensors["old_log_probs"]
    before, after = ((values * mask.bool()).float().cpu() for values in (before, after))
    return Update(before, after, float(np.mean(metrics["actor/grad_norm"])))


def _fixed_batch(num_rows: int) -> DataProto:
    """Rows of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses = [], []
    for row in range(num_rows):
        prompts.append(torch.randint(3, 250, (_PROMPT - row % 4,), generator=generator).tolist())
        length = _RESPONSE - 2 * (row % 5)
        tokens = tuple(torch.randint(3, 250, (length,), generator=generator).tolist())
        responses.append(Response(tokens, (True,) * length, (0.0,) * length, (0,) * length, "stop"))
    batch = assemble(prompts, responses, pad_token_id=0, prompt_length=64, response_length=24)
    return DataProto.from_dict(batch.tensors, meta_info={"temperature": 1.0})
