"""Batch sizes against each other, against data-parallel sizes and token budgets."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dovetail.config.base import Section
from dovetail.config.checks.checked import (
    ACTOR,
    REF,
    ROLLOUT,
    Checked,
    divides,
    error,
    nearest_divisor,
    next_multiple,
    warning,
)
from dovetail.config.errors import Problem
from dovetail.config.plan.layout import RoleLayout


def sequences_divide_over_data_parallel_ranks(run: Checked) -> Iterator[Problem]:
    """Every rank must get the same number of sequences, in a step and in a mini-batch."""
    layout = run.layouts["actor"]
    if not divides(layout):
        return
    n, prompts = run.config.actor_rollout_ref.rollout.n, run.config.data.train_batch_size
    step = _prompts_per_round(layout, n)
    if prompts % step:
        yield error(
            "data.train_batch_size",
            f"data.train_batch_size={prompts} x {ROLLOUT}.n={n} = {prompts * n} sequences do not divide over the "
            f"data-parallel size {layout.data_parallel}; use a multiple of {step}, e.g. "
            f"{next_multiple(prompts, step)}.",
        )
        return
    mini = run.config.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini <= prompts:
        yield from _mini_problem(f"{ACTOR}.ppo_mini_batch_size", mini, n, layout)
    critic = run.layouts.get("critic")
    if critic is None or not divides(critic):
        return
    critic_mini = run.config.critic.ppo_mini_batch_size
    inherited = critic_mini == mini and critic.data_parallel == layout.data_parallel
    if critic_mini <= prompts and not inherited:
        yield from _mini_problem("critic.ppo_mini_batch_size", critic_mini, n, critic)


def mini_batches_fit_in_the_batch(run: Checked) -> Iterator[Problem]:
    prompts = run.config.data.train_batch_size
    actor, critic = run.config.actor_rollout_ref.actor.ppo_mini_batch_size, run.config.critic.ppo_mini_batch_size
    sizes = {f"{ACTOR}.ppo_mini_batch_size": actor}
    if run.config.uses_critic and critic != actor:
        sizes["critic.ppo_mini_batch_size"] = critic
    for key, mini in sizes.items():
        if mini > prompts:
            yield error(
                key,
                f"{key}={mini} is larger than data.train_batch_size={prompts} (both count prompts over all devices); "
                f"use {prompts} or less.",
            )
        elif prompts % mini:
            yield error(
                key,
                f"{key}={mini} does not divide data.train_batch_size={prompts}: the last mini-batch would have "
                f"{prompts % mini} prompts, and all must be whole; use {nearest_divisor(prompts, mini)}.",
            )


def micro_batches_fit_in_a_mini_batch(run: Checked) -> Iterator[Problem]:
    config = run.config
    actor, critic, n = config.actor_rollout_ref.actor, config.critic, config.actor_rollout_ref.rollout.n
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu:
        yield from _micro_problem(
            ACTOR, actor.ppo_micro_batch_size_per_gpu, actor.ppo_mini_batch_size, n, run.layouts["actor"]
        )
    layout = run.layouts.get("critic")
    if layout is None or critic.use_dynamic_bsz or not critic.ppo_micro_batch_size_per_gpu:
        return
    same = (critic.ppo_micro_batch_size_per_gpu, critic.ppo_mini_batch_size, layout.data_parallel) == (
        actor.ppo_micro_batch_size_per_gpu,
        actor.ppo_mini_batch_size,
        run.layouts["actor"].data_parallel,
    )
    if not same:
        yield from _micro_problem("critic", critic.ppo_micro_batch_size_per_gpu, critic.ppo_mini_batch_size, n, layout)


def every_pass_knows_how_to_cut(run: Checked) -> Iterator[Problem]:
    """Without a token budget a pass needs a number of sequences."""
    policy, critic = run.config.actor_rollout_ref, run.config.critic
    cuts: list[tuple[str, str, str, Section]] = [
        (ACTOR, "use_dynamic_bsz", "ppo_micro_batch_size_per_gpu", policy.actor),
        (ROLLOUT, "log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu", policy.rollout),
    ]
    if run.config.uses_reference:
        cuts.append((REF, "log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu", policy.ref))
    if run.config.uses_critic:
        cuts.append(("critic", "use_dynamic_bsz", "ppo_micro_batch_size_per_gpu", critic))
    for prefix, dynamic, micro, section in cuts:
        if getattr(section, dynamic) or getattr(section, micro) is not None:
            continue
        yield error(
            f"{prefix}.{micro}",
            f"{prefix}.{micro} is not set and {prefix}.{dynamic}=False, so nothing says how much one device computes "
            f"at a time; set {prefix}.{micro}=4 (sequences), or {prefix}.{dynamic}=True (by tokens).",
        )
        # The other passes inherit the actor's cut: one message is enough.
        if prefix == ACTOR:
            return


def one_way_of_cutting_is_set(run: Checked) -> Iterator[Problem]:
    actor = run.config.actor_rollout_ref.actor
    if actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is not None:
        key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
        yield warning(
            key,
            f"{key}={actor.ppo_micro_batch_size_per_gpu} has no effect with {ACTOR}.use_dynamic_bsz=True, "
            "which cuts by "
            f"{ACTOR}.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu} tokens; take one of the two out.",
        )


def token_budgets_hold_the_longest_sequence(run: Checked) -> Iterator[Problem]:
    policy, critic = run.config.actor_rollout_ref, run.config.critic
    actor, rollout, ref = policy.actor, policy.rollout, policy.ref
    budgets = [
        ("actor", f"{ACTOR}.ppo_max_token_len_per_gpu", actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu),
        (
            "actor",
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
            rollout.log_prob_use_dynamic_bsz,
            rollout.log_prob_max_token_len_per_gpu,
        ),
        (
            "ref",
            f"{REF}.log_prob_max_token_len_per_gpu",
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_max_token_len_per_gpu,
        ),
        ("critic", "critic.ppo_max_token_len_per_gpu", critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu),
        ("critic", "critic.forward_max_token_len_per_gpu", critic.use_dynamic_bsz, critic.forward_max_token_len),
    ]
    reported: set[tuple[int, int]] = set()
    for role, key, dynamic, budget in budgets:
        layout = run.layouts.get(role)
        if layout is None or not dynamic or not divides(layout):
            continue
        ranks = layout.ranks_per_sequence
        # Keys that inherit the same number would repeat the same message.
        if budget * ranks >= run.longest or (budget, ranks) in reported:
            continue
        reported.add((budget, ranks))
        shared = f" x {ranks} devices per sequence" if ranks > 1 else ""
        yield error(
            key,
            f"{key}={budget}{shared} tokens cannot hold the longest sequence of data.max_prompt_length + "
            f"data.max_response_length = {run.longest} tokens; use {math.ceil(run.longest / ranks)} or more.",
        )


def generation_batches_can_fill_a_training_batch(run: Checked) -> Iterator[Problem]:
    data, filters = run.config.data, run.config.algorithm.filter_groups
    generated, prompts = data.generation_batch_size, data.train_batch_size
    if not filters.enable:
        # Asynchronous recipes set it to 1: they generate prompt by prompt.
        hybrid = run.config.actor_rollout_ref.hybrid_engine
        if hybrid and data.gen_batch_size is not None and generated != prompts:
            yield warning(
                "data.gen_batch_size",
                f"data.gen_batch_size={generated} has no effect without algorithm.filter_groups.enable=True; "
                f"{prompts} prompts are generated per step.",
            )
        return
    rounds = filters.max_num_gen_batches
    if rounds and rounds * generated < prompts:
        yield error(
            "algorithm.filter_groups.max_num_gen_batches",
            f"algorithm.filter_groups.max_num_gen_batches={rounds} x data.gen_batch_size={generated} = "
            f"{rounds * generated} prompts can never fill data.train_batch_size={prompts}; "
            f"use data.gen_batch_size={prompts} or more.",
        )
    elif generated < prompts:
        yield warning(
            "data.gen_batch_size",
            f"data.gen_batch_size={generated} is smaller than data.train_batch_size={prompts}: every step needs "
            f"several generation rounds even when nothing is filtered; use {2 * prompts} or so.",
        )


def pipelines_have_enough_micro_batches(run: Checked) -> Iterator[Problem]:
    actor, layout = run.config.actor_rollout_ref.actor, run.layouts["actor"]
    stages = layout.pipeline_parallel
    if stages == 1 or not divides(layout) or actor.use_dynamic_bsz or not actor.ppo_micro_batch_size_per_gpu:
        return
    per_rank = actor.ppo_mini_batch_size * run.config.actor_rollout_ref.rollout.n // layout.data_parallel
    micro = actor.ppo_micro_batch_size_per_gpu
    count = per_rank // micro
    key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    if layout.virtual_pipeline > 1 and count % stages:
        yield error(
            key,
            f"{key}={micro} makes {count} micro-batches per mini-batch, and the interleaved schedule "
            f"(virtual_pipeline_model_parallel_size={layout.virtual_pipeline}) needs a multiple of the {stages} "
            f"pipeline stages; use {max(1, per_rank // next_multiple(max(1, count), stages))}.",
        )
    elif 0 < count < stages:
        yield warning(
            key,
            f"{key}={micro} makes {count} micro-batches for {stages} pipeline stages, so most stages wait; "
            f"use {max(1, per_rank // stages)}.",
        )


def micro_batches_have_sequences(run: Checked) -> Iterator[Problem]:
    policy, critic = run.config.actor_rollout_ref, run.config.critic
    roles = {"actor": (ACTOR, policy.actor)} | ({"critic": ("critic", critic)} if "critic" in run.layouts else {})
    for name, (prefix, role) in roles.items():
        layout = run.layouts[name]
        if not role.use_dynamic_bsz or not divides(layout):
            continue
        rows = role.ppo_mini_batch_size * policy.rollout.n // layout.data_parallel
        if role.min_num_micro_batch > rows:
            key = f"{prefix}.min_num_micro_batch"
            yield error(
                key,
                f"{key}={role.min_num_micro_batch} asks for more micro-batches than a rank has sequences in a "
                f"mini-batch ({rows}); use {max(1, rows)} or less.",
            )


def samples_fill_a_batch(run: Checked) -> Iterator[Problem]:
    data, wanted = run.config.data, run.config.generation_batch_size
    key = "gen_batch_size" if wanted != data.train_batch_size else "train_batch_size"
    if 0 <= data.train_max_samples < wanted:
        yield error(
            "data.train_max_samples",
            f"data.train_max_samples={data.train_max_samples} is less than data.{key}={wanted}, so a run has no step "
            f"at all; use {wanted} or more, or -1.",
        )


def _prompts_per_round(layout: RoleLayout, n: int) -> int:
    """The smallest number of prompts whose sequences divide over the data-parallel ranks."""
    return layout.data_parallel // math.gcd(layout.data_parallel, n)


def _mini_problem(key: str, mini: int, n: int, layout: RoleLayout) -> Iterator[Problem]:
    step = _prompts_per_round(layout, n)
    if mini % step:
        yield error(
            key,
            f"{key}={mini} x {ROLLOUT}.n={n} = {mini * n} sequences do not divide over the data-parallel size "
            f"{layout.data_parallel}; use a multiple of {step}, e.g. {next_multiple(mini, step)}.",
        )


def _micro_problem(prefix: str, micro: int, mini: int, n: int, layout: RoleLayout) -> Iterator[Problem]:
    if not divides(layout) or mini * n % layout.data_parallel:
        return
    key = f"{prefix}.ppo_micro_batch_size_per_gpu"
    per_rank = mini * n // layout.data_parallel
    if micro > per_rank:
        yield warning(
            key,
            f"{key}={micro} is more than the {per_rank} sequences that a data-parallel rank has per mini-batch "
            f"({prefix}.ppo_mini_batch_size={mini} x n={n} / {layout.data_parallel} ranks); use {per_rank} or less.",
        )
    elif per_rank % micro:
        yield warning(
            key,
            f"{key}={micro} does not divide the {per_rank} sequences of a rank's mini-batch, so the last "
            "micro-batch is "
            f"smaller; use {nearest_divisor(per_rank, micro)} for equal ones.",
        )
