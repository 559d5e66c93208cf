"""The batch arithmetic of one training step as resolved numbers.

`data.train_batch_size` and `ppo_mini_batch_size` count prompts over all devices; `*_micro_batch_size_per_gpu` count
sequences on one device; token budgets count tokens on one device. Refuses nothing: see `dovetail.config.checks`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    max_response_tokens: int
    sequences_per_engine: float
    passes: tuple[PassBatches, ...]


def make_batches(config: DovetailConfig, layouts: dict[str, RoleLayout]) -> BatchPlan:
    """Every pass of one step over `data.train_batch_size` prompts."""
    rollout = config.actor_rollout_ref.rollout
    prompts, n = config.data.train_batch_size, rollout.n
    length = rollout.prompt_length + rollout.response_length
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
        max_response_tokens=prompts * n * rollout.response_length,
        sequences_per_engine=generated * n / (layouts["rollout"].num_engines or 1),
        passes=tuple(_passes(config, layouts, prompts * n, length)),
    )


@dataclass(frozen=True)
class _Cut:
    """How a role cuts its sequences: by count or by tokens."""

    micro_batch: int | None
    token_budget: int | None

    @classmethod
    def of(cls, dynamic: bool, micro_batch: int | None, token_budget: int | None) -> _Cut:
        return cls(None, token_budget) if dynamic else cls(micro_batch, None)


def _passes(config: DovetailConfig, layouts: dict[str, RoleLayout], sequences: int, length: int) -> list[PassBatches]:
    policy, critic = config.actor_rollout_ref, config.critic
    actor, rollout, ref = policy.actor, policy.rollout, policy.ref
    n = rollout.n
    passes = []
    if config.has_log_prob_pass:
        cut = _Cut.of(
            rollout.log_prob_use_dynamic_bsz,
            rollout.log_prob_micro_batch_size_per_gpu,
            rollout.log_prob_max_token_len_per_gpu,
        )
        passes.append(_pass("log-probs", layouts["actor"], cut, sequences, length))
    if "ref" in layouts:
        cut = _Cut.of(
            ref.log_prob_use_dynamic_bsz, ref.log_prob_micro_batch_size_per_gpu, ref.log_prob_max_token_len_per_gpu
        )
        passes.append(_pass("reference log-probs", layouts["ref"], cut, sequences, length))
    if "critic" in layouts:
        cut = _Cut.of(critic.use_dynamic_bsz, critic.forward_micro_batch_size, critic.forward_max_token_len)
        passes.append(_pass("values", layouts["critic"], cut, sequences, length))
        cut = _Cut.of(critic.use_dynamic_bsz, critic.ppo_micro_batch_size_per_gpu, critic.ppo_max_token_len_per_gpu)
        mini = critic.ppo_mini_batch_size * n
        passes.append(
            _pass("update critic", layouts["critic"], cut, sequences, length, mini=mini, epochs=critic.ppo_epochs)
        )
    if "reward_model" in layouts:
        reward = config.reward_model
        budget = reward.forward_max_token_len_per_gpu or critic.forward_max_token_len
        cut = _Cut.of(reward.use_dynamic_bsz, reward.micro_batch_size_per_gpu, budget)
        passes.append(_pass("reward model", layouts["reward_model"], cut, sequences, length))
    cut = _Cut.of(actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu)
    mini = actor.ppo_mini_batch_size * n
    passes.append(_pass("update actor", layouts["actor"], cut, sequences, length, mini=mini, epochs=actor.ppo_epochs))
    return passes


def _pass(
    name: str, layout: RoleLayout, cut: _Cut, sequences: int, length: int, *, mini: int | None = None, epochs: int = 0
) -> PassBatches:
    """An update in mini-batches of `mini` sequences, or a forward pass over everything at once."""
    mini = min(mini or sequences, sequences)
    per_rank = mini / layout.data_parallel
    mini_batches = math.ceil(sequences / mini)
    shared = layout.ranks_per_sequence
    if cut.token_budget is not None:
        # Ranks that share a sequence pool their budgets.
        micro_batches = max(1, math.ceil(per_rank * length / (cut.token_budget * shared)))
        tokens = min(cut.token_budget, math.ceil(per_rank * length / shared))
    else:
        micro = min(cut.micro_batch or math.ceil(per_rank), math.ceil(per_rank))
        micro_batches = math.ceil(per_rank / micro)
        tokens = math.ceil(micro * length / shared)
    return PassBatches(
        name=name,
        role=layout.role,
        trains=epochs > 0,
        sequences_per_rank=_whole(sequences / layout.data_parallel),
        mini_batches=mini_batches,
        sequences_per_mini_batch=_whole(per_rank),
        micro_batch=cut.micro_batch,
        token_budget=cut.token_budget,
        micro_batches=micro_batches,
        optimizer_steps=mini_batches * epochs,
        tokens_per_device=tokens,
    )


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value
