"""Batch sizes against each other, against data-parallel sizes and token budgets."""

from __future__ import annotations

import math

from dovetail.config.actor import ActorConfig
from dovetail.config.checks.examined import Check, Examined, Findings, nearest_divisor, next_multiple
from dovetail.config.critic import CriticConfig
from dovetail.config.plan.batches import PASSES
from dovetail.config.plan.layout import RoleLayout


def _updates(run: Examined) -> list[tuple[str, ActorConfig | CriticConfig, RoleLayout]]:
    """Roles that are trained: name, section and layout. A critic with the actor's sizes has the actor's findings."""
    sections = {"actor": run.actor, "critic": run.config.critic}
    trained = [(role, section, run.layouts[role]) for role, section in sections.items() if role in run.layouts]
    names = ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "min_num_micro_batch")
    sizes = [(*(getattr(section, name) for name in names), layout.data_parallel) for _, section, layout in trained]
    return trained[:1] if sizes[1:] == sizes[:1] else trained


def _sequences_per_rank(run: Examined) -> Findings:
    """Every rank must get the same number of sequences, in a step and in a mini-batch."""
    n, prompts = run.rollout.n, run.data.train_batch_size
    sizes = [("data.train_batch_size", prompts, run.layouts["actor"])]
    sizes += [(f"{role}.ppo_mini_batch_size", each.ppo_mini_batch_size, layout) for role, each, layout in _updates(run)]
    for key, size, layout in sizes:
        # The smallest number of prompts whose sequences divide over the data-parallel ranks.
        step = layout.data_parallel // math.gcd(layout.data_parallel, n)
        if layout.divides and size <= prompts and size % step:
            yield run.error(
                f"<{key}> x <rollout.n> = {size * n} sequences do not divide over the data-parallel size "
                f"{layout.data_parallel}; use a multiple of {step}, e.g. {next_multiple(size, step)}."
            )
            if key == "data.train_batch_size":
                return


def _mini_batches(run: Examined) -> Findings:
    prompts = run.data.train_batch_size
    for role, section, _ in _updates(run):
        mini = section.ppo_mini_batch_size
        if mini > prompts:
            yield run.error(f"<{role}.ppo_mini_batch_size> exceeds <data.train_batch_size>; use {prompts} or less.")
        elif prompts % mini:
            yield run.error(
                f"<{role}.ppo_mini_batch_size> does not divide <data.train_batch_size>: {prompts % mini} prompts would "
                f"be left for the last mini-batch; use {nearest_divisor(prompts, mini)}."
            )


def _micro_batches(run: Examined) -> Findings:
    for role, section, layout in _updates(run):
        micro, key = section.ppo_micro_batch_size_per_gpu, f"{role}.ppo_micro_batch_size_per_gpu"
        rows, left = divmod(section.ppo_mini_batch_size * run.rollout.n, layout.data_parallel)
        if not layout.divides:
            continue
        # Without a row for each rank the batch itself is refused.
        if section.use_dynamic_bsz and 0 < rows < section.min_num_micro_batch:
            yield run.error(
                f"<{role}.min_num_micro_batch> is more than the {rows} sequences of a rank's mini-batch; use {rows} "
                "or less."
            )
        if section.use_dynamic_bsz or not micro or left:
            continue
        if micro > rows:
            yield run.warning(f"<{key}> is more than the {rows} sequences of a rank's mini-batch; use {rows} or less.")
        elif rows % micro:
            yield run.warning(
                f"<{key}> does not divide the {rows} sequences of a rank's mini-batch, so the last micro-batch is "
                f"smaller; use {nearest_divisor(rows, micro)}."
            )


def _cuts(run: Examined) -> Findings:
    """Without a token budget a pass needs a number of sequences."""
    for name in ("update actor", "log-probs", "reference log-probs", "update critic"):
        each = PASSES[name]
        dynamic, micro = f"{each.section}.{each.dynamic}", f"{each.section}.{each.sequences}"
        if each.role in run.layouts and not run.value(dynamic) and run.value(micro) is None:
            yield run.error(
                f"@{micro} is not set and <{dynamic}>: say how much a device computes at a time, with @{micro}=4 "
                f"(sequences) or @{dynamic}=True (by tokens)."
            )
            # The other passes inherit the actor's cut: one message is enough.
            if name == "update actor":
                break


def _token_budgets(run: Examined) -> Findings:
    if run.config.trainer.val_only:  # also of `generate` and `eval`: no pass of training sees the sequences
        return
    seen: set[tuple[int, int]] = set()
    for name in ("update actor", "log-probs", "reference log-probs", "update critic", "values"):
        each = PASSES[name]
        key, layout = f"{each.section}.{each.tokens}", run.layouts.get(each.role)
        budget, dynamic = run.value(key), run.value(f"{each.section}.{each.dynamic}")
        if layout is None or budget is None or not dynamic or not layout.divides:
            continue
        ranks, together = layout.ranks_per_sequence, run.config.sequences_trained_together
        longest = run.longest * together
        # Keys that inherit the same number would repeat the same message.
        if budget * ranks >= longest or (budget, ranks) in seen:
            continue
        seen.add((budget, ranks))
        shared = f" x {ranks} devices per sequence" if ranks > 1 else ""
        what = "the longest sequence of" if together == 1 else "a pair of sequences, each as long as"
        yield run.error(
            f"<{key}>{shared} tokens cannot hold {what} data.max_prompt_length + "
            f"data.max_response_length = {run.longest} tokens; use {math.ceil(longest / ranks)} or more."
        )


def _generation_batches(run: Examined) -> Findings:
    data, filters, wanted = run.data, run.algorithm.filter_groups, run.config.generation_batch_size
    generated, prompts, rounds = data.generation_batch_size, data.train_batch_size, filters.max_num_gen_batches
    if filters.enable and rounds and rounds * generated < prompts:
        yield run.error(
            f"<algorithm.filter_groups.max_num_gen_batches> x data.gen_batch_size={generated} = {rounds * generated} "
            f"prompts can never fill <data.train_batch_size>; use data.gen_batch_size={prompts} or more."
        )
    elif filters.enable and generated < prompts:
        fix = f"use {2 * prompts} or so"
        yield run.warning(f"<data.gen_batch_size> is below <data.train_batch_size>: every step needs rounds; {fix}.")
    if 0 <= data.train_max_samples < wanted:
        key = "gen_batch_size" if wanted != prompts else "train_batch_size"
        yield run.error(f"<data.train_max_samples> is below data.{key}={wanted}: no step at all; use {wanted}, or -1.")


def _pipelines(run: Examined) -> Findings:
    actor, layout = run.actor, run.layouts["actor"]
    stages, micro = layout.pipeline_parallel, actor.ppo_micro_batch_size_per_gpu
    if stages == 1 or not layout.divides or actor.use_dynamic_bsz or not micro:
        return
    per_rank = actor.ppo_mini_batch_size * run.rollout.n // layout.data_parallel
    count = per_rank // micro
    makes = f"<actor.ppo_micro_batch_size_per_gpu> makes {count} micro-batches"
    if layout.virtual_pipeline > 1 and count % stages:
        yield run.error(
            f"{makes} per mini-batch, and the interleaved schedule "
            f"(virtual_pipeline_model_parallel_size={layout.virtual_pipeline}) needs a multiple of the {stages} "
            f"pipeline stages; use {max(1, per_rank // next_multiple(max(1, count), stages))}."
        )
    elif 0 < count < stages:
        yield run.warning(f"{makes} for {stages} stages, so most of them wait; use {max(1, per_rank // stages)}.")


CUTS: tuple[Check, ...] = (_cuts, _token_budgets)
_SIZES: tuple[Check, ...] = (_sequences_per_rank, _mini_batches, _micro_batches)
BATCHES: tuple[Check, ...] = (*_SIZES, *CUTS, _generation_batches, _pipelines)
