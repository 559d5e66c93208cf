"""The batch arithmetic of one training step as resolved numbers.

`data.train_batch_size` and `ppo_mini_batch_size` count prompts over all devices; `*_micro_batch_size_per_gpu` count
sequences on one device; token budgets count tokens on one device. Refuses nothing: see `dovetail.config.checks`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from dovetail.config.base import look_up
from dovetail.config.plan.layout import RoleLayout
from dovetail.config.root import DovetailConfig


@dataclass(frozen=True)
class PassBatches:
    """One pass of one role over the step's sequences."""

    name: str
    role: str
    trains: bool
    sequences_per_rank: float
    mini_batches: int
    sequences_per_mini_batch: float
    # One of the two cuts a mini-batch; both None: in one piece.
    micro_batch: int | None
    token_budget: int | None
    # Per mini-batch on each data-parallel rank, at the longest lengths.
    micro_batches: int
    optimizer_steps: int
    # Most tokens of one micro-batch on one device.
    tokens_per_device: int


@dataclass(frozen=True)
class BatchPlan:
    """The sizes of one step."""

    prompts: int
    responses_per_prompt: int
    sequences: int
    generation_prompts: int
    max_generation_rounds: int
    max_sequence_length: int
    max_tokens: int
    # 0: nothing is generated.
    sequences_per_engine: float
    passes: tuple[PassBatches, ...]


def make_batches(config: DovetailConfig, layouts: dict[str, RoleLayout]) -> BatchPlan:
    """Every pass of one step over `data.train_batch_size` prompts, or rows of a data set."""
    rollout = config.actor_rollout_ref.rollout
    prompts, length = config.data.train_batch_size, config.longest_sequence
    n = rollout.n if config.generates else config.rows_per_example
    generated = config.generation_batch_size
    filters = config.algorithm.filter_groups
    rounds = filters.max_num_gen_batches if filters.enable else 1
    return BatchPlan(
        prompts=prompts,
        responses_per_prompt=n,
        sequences=prompts * n,
        generation_prompts=generated,
        max_generation_rounds=rounds,
        max_sequence_length=length,
        max_tokens=prompts * n * length,
        sequences_per_engine=generated * n / (layouts["rollout"].num_engines or 1) if "rollout" in layouts else 0,
        passes=tuple(_passes(config, layouts, prompts * n, length)),
    )


Cut = tuple[int | None, int | None]
"""Sequences or tokens of a micro-batch; neither: in one piece."""


class Pass(NamedTuple):
    """A pass over the sequences of a step: who computes it, and the keys of `section` that cut it."""

    role: str
    section: str
    dynamic: str = "use_dynamic_bsz"
    sequences: str = "ppo_micro_batch_size_per_gpu"
    tokens: str = "ppo_max_token_len_per_gpu"

    def cut(self, config: DovetailConfig) -> Cut:
        """How the run cuts it."""
        section = look_up(config, "", self.section)
        if getattr(section, self.dynamic):
            return None, getattr(section, self.tokens) or config.critic.forward_max_token_len
        own = getattr(section, self.sequences)
        return own or (config.critic.forward_micro_batch_size if self.section == "critic" else None), None


_LOG_PROBS = ("log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")
_FORWARD = "forward_max_token_len_per_gpu"
PASSES = {
    "log-probs": Pass("actor", "actor_rollout_ref.rollout", *_LOG_PROBS),
    "reference log-probs": Pass("ref", "actor_rollout_ref.ref", *_LOG_PROBS),
    "values": Pass("critic", "critic", sequences="forward_micro_batch_size_per_gpu", tokens=_FORWARD),
    "update critic": Pass("critic", "critic"),
    "reward model": Pass("reward_model", "reward_model", sequences="micro_batch_size_per_gpu", tokens=_FORWARD),
    "update actor": Pass("actor", "actor_rollout_ref.actor"),
}


def _passes(config: DovetailConfig, layouts: dict[str, RoleLayout], sequences: int, length: int) -> list[PassBatches]:
    """A batch of a data set is one optimizer step; generated ones have passes before the update."""
    passes = []
    for name, each in PASSES.items():
        updates = name.startswith("update")
        if each.role not in layouts or not (updates or config.generates):
            continue
        if name == "log-probs" and not config.has_log_prob_pass:
            continue
        rows, mini, epochs = sequences, None, int(updates)
        if name == "log-probs" and config.skips_first_mini_batch:
            rows -= config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
        if updates and config.generates:
            section = look_up(config, "", each.section)
            mini, epochs = section.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n, section.ppo_epochs
        passes.append(_pass(name, layouts[each.role], each.cut(config), rows, length, mini, epochs))
    return passes


def _pass(
    name: str, layout: RoleLayout, cut: Cut, sequences: int, length: int, mini: int | None, epochs: int
) -> PassBatches:
    """An update in mini-batches of `mini` sequences, or a forward pass over everything at once."""
    micro_batch, token_budget = cut
    mini = min(mini or sequences, sequences)
    per_rank = mini / layout.data_parallel
    mini_batches = math.ceil(sequences / mini)
    shared = layout.ranks_per_sequence
    if token_budget is not None:
        # Ranks that share a sequence pool their budgets.
        micro_batches = max(1, math.ceil(per_rank * length / (token_budget * shared)))
        tokens = min(token_budget, math.ceil(per_rank * length / shared))
    else:
        micro = min(micro_batch or math.ceil(per_rank), math.ceil(per_rank))
        micro_batches = math.ceil(per_rank / micro)
        tokens = math.ceil(micro * length / shared)
    return PassBatches(
        name=name,
        role=layout.role,
        trains=epochs > 0,
        sequences_per_rank=_whole(sequences / layout.data_parallel),
        mini_batches=mini_batches,
        sequences_per_mini_batch=_whole(per_rank),
        micro_batch=micro_batch,
        token_budget=token_budget,
        micro_batches=micro_batches,
        optimizer_steps=mini_batches * epochs,
        tokens_per_device=tokens,
    )


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value
