"""The engine's size and sampling, in training and in validation."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dovetail.config.checks.checked import ROLLOUT, Checked, error, nearest_divisor, warning
from dovetail.config.errors import Problem


def engines_divide_the_world(run: Checked) -> Iterator[Problem]:
    rollout, layout = run.config.actor_rollout_ref.rollout, run.layouts["rollout"]
    size = rollout.engine_world_size
    if layout.world_size % size:
        key = f"{ROLLOUT}.tensor_model_parallel_size"
        others = size // rollout.tensor_model_parallel_size
        yield error(
            key,
            f"{key}={rollout.tensor_model_parallel_size} x pipeline {rollout.pipeline_model_parallel_size} x data "
            f"{rollout.data_parallel_size} = {size} devices per engine do not divide the {layout.world_size} devices; "
            f"use {max(1, nearest_divisor(layout.world_size, size) // others)}.",
        )


def engine_splits_the_heads(run: Checked) -> Iterator[Problem]:
    rollout, world = run.config.actor_rollout_ref.rollout, run.layouts["rollout"].world_size
    size = rollout.tensor_model_parallel_size
    if run.shape is not None and run.shape.num_heads % size and world % rollout.engine_world_size == 0:
        key = f"{ROLLOUT}.tensor_model_parallel_size"
        yield error(
            key,
            f"{key}={size} does not divide the model's {run.shape.num_heads} attention heads; "
            f"use {nearest_divisor(math.gcd(run.shape.num_heads, world), size)}.",
        )


def engine_stays_on_a_node(run: Checked) -> Iterator[Problem]:
    rollout = run.config.actor_rollout_ref.rollout
    per_node = rollout.n_gpus_per_node if rollout.own_devices else run.config.trainer.n_gpus_per_node
    size = rollout.tensor_model_parallel_size
    if size > per_node and run.layouts["rollout"].world_size % rollout.engine_world_size == 0:
        yield warning(
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"{ROLLOUT}.tensor_model_parallel_size={size} spreads each layer over nodes of {per_node} "
            "devices, which is "
            f"slow without a fast interconnect; use {per_node} if the model fits.",
        )


def expert_parallel_engine_is_whole(run: Checked) -> Iterator[Problem]:
    rollout = run.config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    key = f"{ROLLOUT}.expert_parallel_size"
    if rollout.expert_parallel_size not in (1, size):
        yield error(
            key,
            f"{key}={rollout.expert_parallel_size} must be 1 or tensor_model_parallel_size x data_parallel_size = "
            f"{size}: engines share experts over all of their devices; use {size}.",
        )
    elif rollout.expert_parallel_size > 1 and run.shape is not None and not run.shape.is_moe:
        yield error(
            key,
            f"{key}={rollout.expert_parallel_size}, but {run.shape.model_type} has no experts to share; use 1.",
        )


def generation_has_its_devices(run: Checked) -> Iterator[Problem]:
    policy = run.config.actor_rollout_ref
    rollout = policy.rollout
    if not policy.hybrid_engine and rollout.nnodes == 0:
        yield error(
            f"{ROLLOUT}.nnodes",
            f"actor_rollout_ref.hybrid_engine=False gives generation its own devices and {ROLLOUT}.nnodes=0; "
            f"set {ROLLOUT}.nnodes=1 and n_gpus_per_node, or hybrid_engine=True.",
        )
    elif policy.hybrid_engine and rollout.nnodes > 0:
        yield error(
            f"{ROLLOUT}.nnodes",
            f"{ROLLOUT}.nnodes={rollout.nnodes} asks for devices of its own and actor_rollout_ref.hybrid_engine=True "
            "shares the trainer's; set hybrid_engine=False, or nnodes=0.",
        )
    elif rollout.weight_sync == "colocated" and rollout.nnodes > 0:
        yield error(
            f"{ROLLOUT}.weight_sync",
            f"{ROLLOUT}.weight_sync=colocated needs engine and trainer on the same devices and {ROLLOUT}.nnodes="
            f"{rollout.nnodes}; use weight_sync=broadcast.",
        )


def training_answers_differ(run: Checked) -> Iterator[Problem]:
    rollout = run.config.actor_rollout_ref.rollout
    greedy = "do_sample=False" if not rollout.do_sample else "temperature=0" if rollout.temperature == 0 else None
    if greedy is None:
        return
    fix = f"use {ROLLOUT}.do_sample=True and {ROLLOUT}.temperature=1.0"
    key = f"{ROLLOUT}.{greedy.split('=')[0]}"
    # Log-probs are trained under the temperature of the samples; under that of a greedy choice they are not numbers.
    if rollout.n > 1:
        yield error(
            key,
            f"{ROLLOUT}.{greedy} makes the {ROLLOUT}.n={rollout.n} responses to a prompt identical, so nothing can be "
            f"learned from comparing them; {fix}.",
        )
    else:
        yield error(key, f"{ROLLOUT}.{greedy} never explores: training needs sampled responses; {fix}.")


def trained_distribution_is_the_sampled_one(run: Checked) -> Iterator[Problem]:
    rollout = run.config.actor_rollout_ref.rollout
    cuts = {
        "top_p": (rollout.top_p, rollout.top_p < 1, "1.0"),
        "top_k": (rollout.top_k, rollout.top_k > 0, "-1"),
        "min_p": (rollout.min_p, rollout.min_p > 0, "0.0"),
        "repetition_penalty": (rollout.repetition_penalty, rollout.repetition_penalty != 1, "1.0"),
    }
    for name, (value, changed, neutral) in cuts.items():
        if changed:
            yield warning(
                f"{ROLLOUT}.{name}",
                f"{ROLLOUT}.{name}={value} samples from another distribution than the one whose log-probs are trained; "
                f"use {neutral} in training (validation has its own in val_kwargs).",
            )


def validation_sampling_is_consistent(run: Checked) -> Iterator[Problem]:
    val = run.config.actor_rollout_ref.rollout.val_kwargs
    key = f"{ROLLOUT}.val_kwargs"
    greedy = not val.do_sample or val.temperature == 0
    if val.n > 1 and greedy:
        how = "do_sample=False" if not val.do_sample else "temperature=0"
        yield warning(
            f"{key}.n",
            f"{key}.n={val.n} with {how} gives {val.n} identical greedy responses; "
            f"use {key}.do_sample=True and {key}.temperature=1.0, or n=1.",
        )
    elif val.do_sample and val.temperature == 0:
        yield warning(
            f"{key}.temperature",
            f"{key}.do_sample=True with temperature=0 is greedy; use temperature=1.0 to sample, or do_sample=False.",
        )
    elif not val.do_sample and val.temperature > 0:
        yield warning(
            f"{key}.do_sample",
            f"{key}.temperature={val.temperature} has no effect with do_sample=False; set {key}.do_sample=True.",
        )


def conversations_have_an_async_engine(run: Checked) -> Iterator[Problem]:
    rollout = run.config.actor_rollout_ref.rollout
    turns = rollout.multi_turn
    if turns.enable and rollout.mode == "sync":
        yield error(
            f"{ROLLOUT}.mode",
            f"{ROLLOUT}.multi_turn.enable=True needs a response at a time and {ROLLOUT}.mode=sync generates whole "
            f"batches; use {ROLLOUT}.mode=async.",
        )
    elif not turns.enable and (turns.tool_config_path or turns.interaction_config_path):
        yield warning(
            f"{ROLLOUT}.multi_turn.enable",
            f"{ROLLOUT}.multi_turn has tools or a simulated user and enable=False, so they are never called; "
            f"set {ROLLOUT}.multi_turn.enable=True.",
        )


def captured_sizes_are_used(run: Checked) -> Iterator[Problem]:
    rollout = run.config.actor_rollout_ref.rollout
    if rollout.enforce_eager and rollout.cudagraph_capture_sizes:
        yield warning(
            f"{ROLLOUT}.cudagraph_capture_sizes",
            f"{ROLLOUT}.cudagraph_capture_sizes={rollout.cudagraph_capture_sizes} has no effect with "
            "enforce_eager=True; set enforce_eager=False to capture graphs.",
        )


def cache_dtype_is_known_to_the_device(run: Checked) -> Iterator[Problem]:
    if run.config.actor_rollout_ref.rollout.kv_cache_dtype == "fp8" and run.config.trainer.device == "cpu":
        key = f"{ROLLOUT}.kv_cache_dtype"
        yield error(key, f"{key}=fp8 needs CUDA and trainer.device=cpu; use {key}=auto.")
