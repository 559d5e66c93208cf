"""What a generation engine keeps on a device: weights, workspace, KV cache. Formulas: docs/plan.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dovetail.config.fsdp import full_dtype
from dovetail.config.plan.activations import forward_activations
from dovetail.config.plan.layout import Device, RoleLayout
from dovetail.config.plan.model_shape import ModelShape
from dovetail.config.plan.role_memory import BYTES
from dovetail.config.rollout import RolloutConfig
from dovetail.config.units import GIB

# CUDA graphs and their pools, when they are captured.
GRAPHS = 1.0 * GIB
# The embedded engine's share one pool. Measured with what its kernels keep beside it.
PAGED_GRAPHS = 0.25 * GIB
# Tokens in a page of the embedded engine's cache on a GPU.
PAGE = 64
# Sequences whose logits it holds at a time.
LOGIT_ROWS = 1024


@dataclass(frozen=True)
class EngineMemory:
    """Bytes per device of one engine, and how much text its cache holds."""

    weights: float
    workspace: float
    cache: float
    # Bytes of cache that one token takes on one device.
    cache_per_token: float
    max_length: int
    # Share of the device that the config gives to the engine.
    budget: float

    @property
    def cached_tokens(self) -> int:
        return int(self.cache / self.cache_per_token)

    @property
    def full_sequences(self) -> float:
        """Longest sequences that an engine replica can hold at a time."""
        return self.cached_tokens / self.max_length

    @property
    def fits(self) -> bool:
        """Whether one longest sequence fits, without which the engine refuses to start."""
        return self.full_sequences >= 1


def engine_memory(
    shape: ModelShape,
    layout: RoleLayout,
    rollout: RolloutConfig,
    *,
    device: Device,
    sequences_per_replica: float,
    shares_weights: bool = False,
) -> EngineMemory:
    """The memory of one engine device; what is left of its budget becomes KV cache.

    `shares_weights`: the engine reads the trainer's own tensors, so it holds none. On a CPU the embedded engine holds a
    copy of its bfloat16 weights in the layout of their products.
    """
    weights = 0.0 if shares_weights else engine_weights(shape, layout, rollout)
    if rollout.name == "native" and not device.is_accelerator and full_dtype(rollout.dtype) == "bfloat16":
        weights += engine_weights(shape, layout, rollout)
    local = RoleLayout("rollout", layout.backend, layout.pool, 1, 1, tensor_parallel=layout.tensor_parallel)
    per_token = _cache_per_token(shape, layout, rollout)
    budget = rollout.gpu_memory_utilization * device.memory_bytes
    running = min(rollout.max_num_seqs, sequences_per_replica)
    is_paged = rollout.name == "native" and device.is_accelerator
    if is_paged:
        # A step reads no more prompts than run, and draws from logits as they come, some rows at a time.
        prompts = math.ceil(running / rollout.n) * rollout.prompt_length
        workspace = forward_activations(shape, local, min(rollout.max_num_batched_tokens, prompts))
        workspace += BYTES[full_dtype(rollout.dtype)] * min(running, LOGIT_ROWS) * shape.vocab_size
    else:
        # An engine holds one layer's activations of a step and fp32 logits of each running sequence.
        workspace = forward_activations(shape, local, rollout.max_num_batched_tokens)
        workspace += 2 * 4 * rollout.max_num_seqs * shape.vocab_size / layout.tensor_parallel
    if device.is_accelerator and not rollout.enforce_eager:
        workspace += PAGED_GRAPHS if is_paged else GRAPHS
    cache = max(0.0, budget - weights - workspace)
    if rollout.name == "native":
        # The embedded engine allocates what its running sequences need; the others reserve their whole budget.
        length = rollout.context_length
        if is_paged:  # whole pages, and one beside them for a prompt's last page
            length = (math.ceil(length / PAGE) + 1) * PAGE
        elif rollout.uses_agents and rollout.enable_prefix_caching:
            length *= 2  # conversations between two turns keep as many tokens as those that run
        cache = min(cache, running * length * per_token)
    return EngineMemory(weights, workspace, cache, per_token, rollout.context_length, budget)


def engine_weights(shape: ModelShape, layout: RoleLayout, rollout: RolloutConfig) -> float:
    """Bytes of weights on one device of an engine."""
    value = BYTES[full_dtype(rollout.dtype)]
    in_layers = 1 if (rollout.quantization or "").startswith("fp8") else value  # embedding and head are not quantised
    cut = layout.tensor_parallel * layout.pipeline_parallel
    wide = shape.embedding + shape.head
    routed = sum(layer.routed_experts for layer in shape.layers)
    # With expert parallelism the replicas of one engine share the experts; without it each has its own.
    expert_cut = max(cut, layout.expert_parallel * layout.pipeline_parallel)
    return value * wide / cut + in_layers * ((shape.parameters - wide - routed) / cut + routed / expert_cut)


def _cache_per_token(shape: ModelShape, layout: RoleLayout, rollout: RolloutConfig) -> float:
    per_value = 1 if rollout.kv_cache_dtype == "fp8" else BYTES[full_dtype(rollout.dtype)]
    layers = shape.num_layers / layout.pipeline_parallel
    if shape.latent_cache_width is not None:
        # The latent vector has no heads to split: every tensor-parallel rank holds all of it.
        return per_value * layers * shape.latent_cache_width
    heads = max(1, shape.num_kv_heads / layout.tensor_parallel)
    return per_value * layers * 2 * heads * shape.head_dim
