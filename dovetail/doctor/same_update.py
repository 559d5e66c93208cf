"""One policy update on many devices must be the update of one process: log-probs before and after, gradient norm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dovetail.config.root import DovetailConfig
from dovetail.controller import WorkerGroup
from dovetail.doctor.agreement import OVERRIDES
from dovetail.protocol import DataProto
from dovetail.rollout.assemble import Response, assemble
from dovetail.trainer.arrange import arrange_rows
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
    lengths = batch.tensors["attention_mask"].sum(1).tolist()
    batch.reorder(arrange_rows(lengths, policy.dp_size("actor"), num_rows))
    mask = batch.tensors["response_mask"].bool()
    before = policy.compute_log_prob(batch).tensors["old_log_probs"]
    columns = {**batch.tensors, "old_log_probs": before}
    trained = DataProto.from_dict(columns, meta_info=dict(batch.meta_info))
    metrics = policy.update_actor(trained).meta_info["metrics"]
    after = policy.compute_log_prob(batch).tensors["old_log_probs"]
    # By the row's own number: ranks may have been given the rows in another order.
    order = torch.argsort(batch.tensors["row"])
    before, after = ((values * mask)[order].float().cpu() for values in (before, after))
    return Update(before, after, float(np.mean(metrics["actor/grad_norm"])))


def _fixed_batch(num_rows: int) -> DataProto:
    """Rows of unequal lengths; advantages of both signs."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses = [], []
    for row in range(num_rows):
        prompts.append(torch.randint(3, 250, (_PROMPT - row % 4,), generator=generator).tolist())
        length = _RESPONSE - 2 * (row % 5)
        tokens = tuple(torch.randint(3, 250, (length,), generator=generator).tolist())
        responses.append(Response(tokens, (True,) * length, (0.0,) * length, (0,) * length, "stop"))
    batch = assemble(prompts, responses, pad_token_id=0, prompt_length=64, response_length=24)
    signs = 1.0 - 1.5 * (torch.arange(num_rows) % 2)[:, None]
    columns = {**batch.tensors, "advantages": signs * batch.tensors["response_mask"], "row": torch.arange(num_rows)}
    return DataProto.from_dict(columns, meta_info={"temperature": 1.0})
