"""Parallel sizes against the number of devices, the layers and the heads."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dovetail.config.checks.checked import ACTOR, MODEL, REF, Checked, divides, error, nearest_divisor, warning
from dovetail.config.errors import Problem
from dovetail.config.fsdp import FSDPConfig
from dovetail.config.megatron import MegatronConfig
from dovetail.config.plan.layout import RoleLayout

# Sizes that Megatron's process groups are made of, and their keys.
_GROUP_SIZES = {
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
    "expert_tensor_parallel": "expert_tensor_parallel_size",
}
SECTIONS = {"actor": ACTOR, "ref": REF, "critic": "critic", "reward_model": "reward_model"}


def single_process_has_one_device(run: Checked) -> Iterator[Problem]:
    world = run.config.trainer.world_size
    if run.config.actor_rollout_ref.actor.strategy == "single" and world > 1:
        yield error(
            f"{ACTOR}.strategy",
            f"{ACTOR}.strategy=single trains in one process, and trainer.nnodes x trainer.n_gpus_per_node = {world}; "
            f"use trainer.n_gpus_per_node=1, or {ACTOR}.strategy=fsdp2.",
        )


def model_parallel_sizes_divide_the_world(run: Checked) -> Iterator[Problem]:
    for layout, prefix in _megatron_roles(run):
        size = layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel
        if layout.world_size % size:
            yield error(
                f"{prefix}.megatron",
                f"{prefix}.megatron: TP {layout.tensor_parallel} x PP {layout.pipeline_parallel} x "
                f"CP {layout.context_parallel} = {size} does not divide the {layout.world_size} devices "
                f"(TP x PP x CP x DP = devices); use a number of devices that is a multiple of {size}, "
                f"or sizes whose product is {nearest_divisor(layout.world_size, size)}.",
            )


def expert_parallel_sizes_fit(run: Checked) -> Iterator[Problem]:
    for layout, prefix in _megatron_roles(run):
        if not divides(layout) or layout.expert_parallel == 1:
            continue
        key = f"{prefix}.megatron.expert_model_parallel_size"
        per_stage = layout.world_size // layout.pipeline_parallel
        size = layout.expert_parallel * layout.expert_tensor_parallel
        if per_stage % size:
            best = nearest_divisor(per_stage // layout.expert_tensor_parallel, layout.expert_parallel)
            yield error(
                key,
                f"{key}={layout.expert_parallel} x expert tensor parallel {layout.expert_tensor_parallel} = {size} "
                f"does not divide the {per_stage} devices of a pipeline stage; use {best}.",
            )
        elif run.shape and not run.shape.is_moe:
            yield error(
                key, f"{key}={layout.expert_parallel}, but {run.shape.model_type} has no experts to share; use 1."
            )
        elif run.shape and run.shape.num_experts % layout.expert_parallel:
            # The fix must divide the devices of a stage as well.
            common = math.gcd(run.shape.num_experts, per_stage // layout.expert_tensor_parallel)
            best = nearest_divisor(common, layout.expert_parallel)
            yield error(
                key,
                f"{key}={layout.expert_parallel} does not divide the model's {run.shape.num_experts} experts; "
                f"use {best}.",
            )


def pipeline_stages_share_the_layers(run: Checked) -> Iterator[Problem]:
    for layout, prefix in _megatron_roles(run):
        key = f"{prefix}.megatron.pipeline_model_parallel_size"
        if layout.virtual_pipeline > 1 and layout.pipeline_parallel == 1:
            virtual = f"{prefix}.megatron.virtual_pipeline_model_parallel_size"
            yield error(
                virtual,
                f"{virtual}={layout.virtual_pipeline} needs pipeline stages to interleave and {key}=1; "
                f"set {key}=2 or more, or {virtual}=null.",
            )
        elif run.shape is not None and divides(layout):
            yield from _stage_problem(run.shape.num_layers, layout, prefix, key)


def _stage_problem(num_layers: int, layout: RoleLayout, prefix: str, key: str) -> Iterator[Problem]:
    try:
        layout.stages(num_layers)
    except ValueError as problem:
        common = math.gcd(num_layers, layout.world_size // (layout.tensor_parallel * layout.context_parallel))
        best = nearest_divisor(common, layout.pipeline_parallel)
        option = f"{prefix}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage"
        yield error(
            key,
            f"{key}={layout.pipeline_parallel}: {problem}; use {best}, "
            f"or give the end stages their own share of the {num_layers} layers with +{option} "
            "and num_layers_in_last_pipeline_stage.",
        )


def pipeline_splits_are_understood(run: Checked) -> Iterator[Problem]:
    for layout, prefix in _megatron_roles(run):
        extra = _section(run, layout.role).override_transformer_config
        key = f"{prefix}.megatron.override_transformer_config.pipeline_model_parallel_layout"
        if extra.get("pipeline_model_parallel_layout") is not None:
            yield error(
                key,
                f"{key} is not planned here; say how the layers are shared with num_layers_in_first_pipeline_stage, "
                "num_layers_in_last_pipeline_stage, account_for_embedding_in_pipeline_split and "
                "account_for_loss_in_pipeline_split.",
            )


def megatron_roles_share_one_layout(run: Checked) -> Iterator[Problem]:
    """Megatron keeps its process groups for the whole process, and the roles of a pool share processes."""
    first: dict[str, RoleLayout] = {}
    for name, prefix in SECTIONS.items():
        layout = run.layouts.get(name)
        if layout is None or not layout.is_megatron:
            continue
        other = first.setdefault(layout.pool, layout)
        for field, key in _GROUP_SIZES.items():
            asked, used = getattr(layout, field), getattr(other, field)
            if asked != used:
                yield error(
                    f"{prefix}.megatron.{key}",
                    f"{prefix}.megatron.{key}={asked} and the {other.role} in the same processes has {used}; Megatron "
                    f"has one layout for each process: use {used}.",
                )


def tensor_parallel_sizes_divide_the_widths(run: Checked) -> Iterator[Problem]:
    if run.shape is None:
        return
    for layout, prefix in _megatron_roles(run):
        if not divides(layout):
            continue
        shape, size, share = run.shape, layout.tensor_parallel, layout.expert_tensor_parallel
        has_dense = any(not layer.is_moe for layer in shape.layers)
        widths = [
            ("tensor_model_parallel_size", size, shape.intermediate_size if has_dense else 0, "feed-forward width"),
            ("tensor_model_parallel_size", size, shape.shared_intermediate_size, "width of the shared expert"),
            ("expert_tensor_parallel_size", share, shape.expert_intermediate_size, "width of an expert"),
        ]
        for name, parts, width, words in widths:
            if width % parts:
                key = f"{prefix}.megatron.{name}"
                best = nearest_divisor(width, parts)
                yield error(key, f"{key}={parts} does not divide the model's {words} of {width}; use {best}.")


def tensor_parallel_size_divides_the_heads(run: Checked) -> Iterator[Problem]:
    if run.shape is None:
        return
    for layout, prefix in _megatron_roles(run):
        key = f"{prefix}.megatron.tensor_model_parallel_size"
        if divides(layout):
            yield from _head_problem(run, key, layout.tensor_parallel, layout.world_size)


def sequence_parallel_size_fits(run: Checked) -> Iterator[Problem]:
    for layout, prefix in _roles(run):
        size = layout.sequence_parallel
        key = f"{prefix}.ulysses_sequence_parallel_size"
        if size == 1:
            continue
        if layout.world_size % size:
            yield error(
                key,
                f"{key}={size} does not divide the {layout.world_size} devices; "
                f"use {nearest_divisor(layout.world_size, size)}.",
            )
            continue
        if run.shape is not None:
            yield from _head_problem(run, key, size, layout.world_size)


def sequence_parallel_needs_packing(run: Checked) -> Iterator[Problem]:
    policy, critic = run.config.actor_rollout_ref, run.config.critic
    pairs = [(f"{ACTOR}.ulysses_sequence_parallel_size", policy.actor.ulysses_sequence_parallel_size, MODEL)]
    packed = {MODEL: policy.model.use_remove_padding, "critic.model": critic.model.use_remove_padding}
    if run.config.uses_critic:
        size = critic.ulysses_sequence_parallel_size
        pairs.append(("critic.ulysses_sequence_parallel_size", size, "critic.model"))
    for key, size, model in pairs:
        if size > 1 and not packed[model]:
            yield error(
                key,
                f"{key}={size} cuts packed sequences and {model}.use_remove_padding=False; "
                f"set {model}.use_remove_padding=True, or {key}=1.",
            )


def sharding_group_divides_the_world(run: Checked) -> Iterator[Problem]:
    for layout, prefix, fsdp in _fsdp_roles(run):
        key = f"{prefix}.fsdp_config.fsdp_size"
        size = fsdp.fsdp_size
        if size == 0 or (size > 0 and layout.world_size % size):
            best = nearest_divisor(layout.world_size, size) if size else -1
            yield error(
                key,
                f"{key}={size} does not divide the {layout.world_size} devices into equal groups; "
                f"use {best}, or -1 for one group.",
            )


def strategy_matches_its_sections(run: Checked) -> Iterator[Problem]:
    policy = run.config.actor_rollout_ref
    sections = [(ACTOR, policy.actor.strategy, policy.actor.megatron, policy.actor.ulysses_sequence_parallel_size)]
    if run.config.uses_critic:
        critic = run.config.critic
        sections.append(("critic", critic.strategy, critic.megatron, critic.ulysses_sequence_parallel_size))
    for prefix, strategy, megatron, sequence in sections:
        if strategy == "megatron" and sequence > 1:
            key = f"{prefix}.ulysses_sequence_parallel_size"
            yield warning(
                key,
                f"{key}={sequence} has no effect: it is for fsdp and fsdp2 and {prefix}.strategy=megatron; "
                f"set it to 1 and {prefix}.megatron.context_parallel_size={sequence}.",
            )
        elif strategy != "megatron" and (cut := _cuts(megatron)):
            yield warning(
                f"{prefix}.megatron.{cut}",
                f"{prefix}.megatron.{cut}={getattr(megatron, cut)} has no effect with {prefix}.strategy={strategy}; "
                f"set {prefix}.strategy=megatron, or take the key out.",
            )


def reference_shares_the_actor_backend(run: Checked) -> Iterator[Problem]:
    policy = run.config.actor_rollout_ref
    if run.config.uses_reference and (policy.actor.strategy == "megatron") != (policy.ref.strategy == "megatron"):
        yield error(
            f"{REF}.strategy",
            f"{REF}.strategy={policy.ref.strategy} and {ACTOR}.strategy={policy.actor.strategy} cannot share one "
            f"process; use {REF}.strategy={policy.actor.strategy}.",
        )


def offload_has_an_effect(run: Checked) -> Iterator[Problem]:
    for layout, prefix, fsdp in _fsdp_roles(run):
        section = f"{prefix}.fsdp_config"
        if fsdp.offload_policy and layout.backend != "fsdp2":
            yield warning(
                f"{section}.offload_policy",
                f"{section}.offload_policy=True works with strategy fsdp2 only, here {layout.backend}; "
                f"use {prefix}.strategy=fsdp2, or {section}.param_offload=True.",
            )
        elif (fsdp.param_offload or fsdp.optimizer_offload) and run.config.trainer.device == "cpu":
            yield warning(
                f"{section}.param_offload",
                f"{section}.param_offload / optimizer_offload=True moves to host memory what trainer.device=cpu keeps "
                "there already; set both to False.",
            )


def _cuts(megatron: MegatronConfig) -> str | None:
    names = ("tensor", "pipeline", "expert")
    keys = [f"{name}_model_parallel_size" for name in names] + ["context_parallel_size"]
    return next((key for key in keys if getattr(megatron, key) > 1), None)


def _head_problem(run: Checked, key: str, size: int, world: int) -> Iterator[Problem]:
    shape = run.shape
    if shape is None or size == 1:
        return
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    shares_keys = [s for s in range(1, size + 1) if kv_heads % s == 0 or s % kv_heads == 0]
    best = max(s for s in shares_keys if heads % s == 0 and world % s == 0)
    if heads % size:
        yield error(
            key,
            f"{key}={size} does not divide the model's {heads} attention heads; use {best}.",
        )
    elif shape.latent_cache_width is None and kv_heads % size and size % kv_heads:
        yield error(
            key,
            f"{key}={size} neither divides the model's {kv_heads} key-value heads nor is a multiple of them; "
            f"use {best}.",
        )


def _roles(run: Checked) -> list[tuple[RoleLayout, str]]:
    """Training roles with the prefix of their keys; a reference cut like the actor is left out."""
    actor = run.layouts["actor"]
    roles = []
    for name, prefix in SECTIONS.items():
        layout = run.layouts.get(name)
        if layout is None or (name == "ref" and _sizes(layout) == _sizes(actor)):
            continue
        roles.append((layout, prefix))
    return roles


def _sizes(layout: RoleLayout) -> tuple[object, ...]:
    return tuple(value for key, value in vars(layout).items() if key != "role")


def _megatron_roles(run: Checked) -> list[tuple[RoleLayout, str]]:
    return [(layout, prefix) for layout, prefix in _roles(run) if layout.is_megatron]


def _section(run: Checked, role: str) -> MegatronConfig:
    policy = run.config.actor_rollout_ref
    sections = {
        "actor": policy.actor.megatron,
        "ref": policy.ref.megatron,
        "critic": run.config.critic.megatron,
        "reward_model": run.config.reward_model.megatron,
    }
    return sections[role]


def _fsdp_roles(run: Checked) -> list[tuple[RoleLayout, str, FSDPConfig]]:
    config = run.config
    sections = {
        ACTOR: config.actor_rollout_ref.actor.fsdp_config,
        REF: config.actor_rollout_ref.ref.fsdp_config,
        "critic": config.critic.fsdp_config,
        "reward_model": config.reward_model.model.fsdp_config,
    }
    return [
        (run.layouts[name], prefix, sections[prefix])
        for name, prefix in SECTIONS.items()
        if name in run.layouts and run.layouts[name].backend in ("fsdp", "fsdp2")
    ]
