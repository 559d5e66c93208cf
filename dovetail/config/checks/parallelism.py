"""Parallel sizes against the number of devices, the layers and the heads."""

from __future__ import annotations

import math
from dataclasses import replace

from dovetail.config.checks.examined import Check, Examined, Findings, nearest_divisor
from dovetail.config.plan.layout import RoleLayout
from dovetail.config.plan.model_shape import ModelShape

# Sizes that Megatron's process groups are made of, and their keys.
_GROUP_SIZES = {
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
    "expert_tensor_parallel": "expert_tensor_parallel_size",
}


def _roles(run: Examined, *backends: str) -> list[RoleLayout]:
    """Training roles on `backends`; a reference cut like the actor is left out."""
    copy = replace(run.layouts["actor"], role="ref") if "actor" in run.layouts else None
    return [
        layout
        for layout in (run.layouts.get(role) for role in ("actor", "ref", "critic", "reward_model"))
        if layout is not None and layout != copy and layout.backend in backends
    ]


def _strategies(run: Examined) -> Findings:
    strategy, world = run.actor.strategy, run.trainer.world_size
    if strategy == "single" and world > 1:
        yield run.error(
            f"<actor.strategy> trains in one process, and trainer.nnodes x trainer.n_gpus_per_node = {world}; use "
            "trainer.n_gpus_per_node=1, or @actor.strategy=fsdp2."
        )
    shares = run.config.uses_reference and not run.config.teacher_devices
    if shares and (strategy == "megatron") != (run.value("ref.strategy") == "megatron"):
        yield run.error(f"<ref.strategy> and <actor.strategy> cannot share a process; use @ref.strategy={strategy}.")
    models = {"actor": "model"} | ({"critic": "critic.model"} if run.config.uses_critic else {})
    for role, model in models.items():
        key, packs = f"{role}.ulysses_sequence_parallel_size", f"{model}.use_remove_padding"
        if run.value(key) > 1 and not run.value(packs):
            yield run.error(f"<{key}> cuts packed sequences and <{packs}>; set @{packs}=True, or @{key}=1.")


def _megatron_sizes(run: Examined) -> Findings:
    for layout in _roles(run, "megatron"):
        prefix = f"{layout.role}.megatron"
        size = layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel
        if not layout.divides:
            yield run.error(
                f"@{prefix}: TP {layout.tensor_parallel} x PP {layout.pipeline_parallel} x CP "
                f"{layout.context_parallel} = {size} does not divide the {layout.world_size} devices (TP x PP x CP x "
                f"DP = devices); use a number of devices that is a multiple of {size}, or sizes whose product is "
                f"{nearest_divisor(layout.world_size, size)}."
            )
        elif layout.expert_parallel > 1:
            yield from _expert_size(run, layout, f"{prefix}.expert_model_parallel_size")
        yield from _pipeline_stages(run, layout, prefix)
        if run.shape is not None and layout.divides:
            yield from _tensor_sizes(run, layout, prefix, run.shape)


def _expert_size(run: Examined, layout: RoleLayout, key: str) -> Findings:
    size, share = layout.expert_parallel, layout.expert_tensor_parallel
    per_stage = layout.world_size // layout.pipeline_parallel
    if per_stage % (size * share):
        yield run.error(
            f"@{key}={size} x expert tensor parallel {share} = {size * share} does not divide the {per_stage} devices "
            f"of a pipeline stage; use {nearest_divisor(per_stage // share, size)}."
        )
    elif run.shape and not run.shape.is_moe:
        yield run.error(f"@{key}={size}, but {run.shape.model_type} has no experts to share; use 1.")
    elif run.shape and run.shape.num_experts % size:
        # The fix must divide the devices of a stage as well.
        best = nearest_divisor(math.gcd(run.shape.num_experts, per_stage // share), size)
        yield run.error(f"@{key}={size} does not divide the model's {run.shape.num_experts} experts; use {best}.")


def _pipeline_stages(run: Examined, layout: RoleLayout, prefix: str) -> Findings:
    key, virtual = f"{prefix}.pipeline_model_parallel_size", f"{prefix}.virtual_pipeline_model_parallel_size"
    option = f"{prefix}.override_transformer_config"
    if layout.virtual_pipeline > 1 and layout.pipeline_parallel == 1:
        yield run.error(f"<{virtual}> needs stages to interleave and <{key}>; set @{key}=2, or @{virtual}=null.")
    elif run.shape is not None and layout.divides:
        num_layers = run.shape.num_layers
        try:
            layout.stages(num_layers)
        except ValueError as problem:
            common = math.gcd(num_layers, layout.world_size // (layout.tensor_parallel * layout.context_parallel))
            fewer = nearest_divisor(common, layout.pipeline_parallel)
            ways = [f"use {fewer}"] if fewer > 1 else []
            if (ends := _end_shares(layout, num_layers)) is not None:
                shares = [f"+@{option}.num_layers_in_{end}_pipeline_stage=" for end in ("first", "last")]
                ways.append(
                    f"give the end stages their own share of the {num_layers} layers: {shares[0]}{ends[0]} "
                    f"{shares[1]}{ends[1]}"
                )
            ways = ways or [f"use a number of stages that divides the {num_layers} layers"]
            yield run.error(f"<{key}>: {problem}; {', or '.join(ways)}.")
    if run.value(option).get("pipeline_model_parallel_layout") is not None:
        yield run.error(
            f"@{option}.pipeline_model_parallel_layout is not planned here; say how the layers are shared with "
            "num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage, "
            "account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split."
        )


def _end_shares(layout: RoleLayout, num_layers: int) -> tuple[int, int] | None:
    """Layers for the first and the last stage, at most as many as the others hold; None if there is no such split."""
    each = -(-num_layers // layout.pipeline_parallel)
    rest = num_layers - each * (layout.pipeline_parallel - 2)
    first, last = rest - rest // 2, rest // 2
    try:
        replace(layout, first_stage_layers=first, last_stage_layers=last).stages(num_layers)
    except ValueError:
        return None
    return (first, last) if last > 0 and first <= each else None


def _tensor_sizes(run: Examined, layout: RoleLayout, prefix: str, shape: ModelShape) -> Findings:
    size, share = layout.tensor_parallel, layout.expert_tensor_parallel
    dense = shape.intermediate_size if any(not layer.is_moe for layer in shape.layers) else 0
    for name, parts, width, words in (
        ("tensor_model_parallel_size", size, dense, "feed-forward width"),
        ("tensor_model_parallel_size", size, shape.shared_intermediate_size, "width of the shared expert"),
        ("expert_tensor_parallel_size", share, shape.expert_intermediate_size, "width of an expert"),
    ):
        if width % parts:
            best = nearest_divisor(width, parts)
            yield run.error(f"@{prefix}.{name}={parts} does not divide the model's {words} of {width}; use {best}.")
    yield from _heads(run, f"{prefix}.tensor_model_parallel_size", size, layout.world_size)


def _heads(run: Examined, key: str, size: int, world: int) -> Findings:
    shape = run.shape
    if shape is None or size == 1:
        return
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    shares_keys = [s for s in range(1, size + 1) if kv_heads % s == 0 or s % kv_heads == 0]
    best = max(s for s in shares_keys if heads % s == 0 and world % s == 0)
    if heads % size:
        yield run.error(f"<{key}> does not divide the model's {heads} attention heads; use {best}.")
    elif shape.latent_cache_width is None and kv_heads % size and size % kv_heads:
        yield run.error(
            f"<{key}> neither divides the model's {kv_heads} key-value heads nor is a multiple of them; use {best}."
        )


def _one_megatron_layout(run: Examined) -> Findings:
    """Megatron keeps its process groups for the whole process, and the roles of a pool share processes."""
    first: dict[str, RoleLayout] = {}
    for layout in _roles(run, "megatron"):
        other = first.setdefault(layout.pool, layout)
        for field, key in _GROUP_SIZES.items():
            asked, used = getattr(layout, field), getattr(other, field)
            if asked != used:
                yield run.error(
                    f"@{layout.role}.megatron.{key}={asked} and the {other.role} in the same processes has {used}; "
                    f"Megatron has one layout for each process: use {used}."
                )


def _sharding(run: Examined) -> Findings:
    for layout in _roles(run, "fsdp", "fsdp2"):
        world, sequence = layout.world_size, layout.sequence_parallel
        key = f"{layout.role}.ulysses_sequence_parallel_size"
        if world % sequence:
            yield run.error(f"<{key}> does not divide the {world} devices; use {nearest_divisor(world, sequence)}.")
        else:
            yield from _heads(run, key, sequence, world)
    for role in ("actor", "ref", "critic", "reward_model"):
        layout = run.layouts.get(role)
        if layout is None or layout.backend not in ("fsdp", "fsdp2"):
            continue
        section = "reward_model.model.fsdp_config" if role == "reward_model" else f"{role}.fsdp_config"
        size = run.value(f"{section}.fsdp_size")
        if size == 0 or (size > 0 and layout.world_size % size):
            best = nearest_divisor(layout.world_size, size) if size else -1
            yield run.error(
                f"<{section}.fsdp_size> does not divide the {layout.world_size} devices into equal groups; use {best}, "
                "or -1 for one group."
            )


PARALLELISM: tuple[Check, ...] = (_strategies, _megatron_sizes, _one_megatron_layout, _sharding)
