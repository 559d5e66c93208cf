"""Run a Hugging Face causal model on packed tokens over the pages: fused where the layer is known, else as it is.

The known layer is the one Llama brought and Mistral, Qwen2, Qwen3 and their mixtures kept: norm, attention (with or
without biases and head norms), norm, gated feed-forward or experts. Its modules stay the model's own; only the
operations between the matrix products are fused. A model of any other class runs through its own forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from dovetail.models.router_replay import RouterReplay
from dovetail.rollout.native.cuda.kernels.ops import Ops
from dovetail.rollout.native.cuda.paged_step import PagedStep, PlainAttend
from dovetail.rollout.native.cuda.small_batch import SmallBatch, has_moving_rope

# Rows whose logits are there at a time: a bfloat16 vocabulary of 152 k takes 0.3 GiB then, and products stay as fast.
_LOGIT_ROWS = 1024

_KNOWN = frozenset(f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe"))


def build_decoder(
    model: PreTrainedModel, ops: Ops, *, fuse: bool = True, routing: RouterReplay | None = None
) -> Decoder:
    decoder = _without_record(model, ops, fuse=fuse)
    return decoder if routing is None else RecordingDecoder(decoder, routing)


def _without_record(model: PreTrainedModel, ops: Ops, *, fuse: bool) -> PlainDecoder | FusedDecoder:
    known = type(model).__name__ in _KNOWN and type(model).__module__.startswith("transformers.")
    if fuse and known and getattr(model.config, "hidden_act", "silu") == "silu":
        return FusedDecoder(model, ops)
    return PlainDecoder(model)


def can_be_captured(model: PreTrainedModel) -> bool:
    """Whether a step of this model can be a CUDA graph: no sizes or branches that depend on values on the device."""
    if hasattr(model.config, "vision_config"):
        return False  # its forward looks for images
    experts = any(hasattr(module, "gate_up_proj") and hasattr(module, "num_experts") for module in model.modules())
    # In other dtypes than bfloat16 transformers multiplies experts one by one, each with a size read from the device.
    return not has_moving_rope(model) and (not experts or model.dtype == torch.bfloat16)


class PlainDecoder:
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def fill(self, tokens: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> None:
        """Fill the pages with these tokens' entries."""
        # The module under the head: no logits, and so no (tokens, vocabulary) matrix, for prompts.
        self._run(self._model.base_model, tokens, positions, step)

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, step: PagedStep
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Logits (tokens, vocabulary) after some of these tokens at a time, and which they are; fills the pages too."""
        yield slice(None), self._run(self._model, tokens, positions, step).logits[0]

    def _run(self, module: nn.Module, tokens: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> Any:
        return module(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            kv_step=PlainAttend(step),
        )


class RecordingDecoder:
    """The methods of `PlainDecoder`: those of another one, which also puts the experts of its tokens into the pages."""

    def __init__(self, decoder: PlainDecoder | FusedDecoder, routing: RouterReplay) -> None:
        self._decoder = decoder
        self._routing = routing

    def fill(self, tokens: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> None:
        self._decoder.fill(tokens, positions, step)
        step.pool.put_experts(step.targets, self._routing.recorded())

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, step: PagedStep
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        yield from self._decoder.logits(tokens, positions, step)
        step.pool.put_experts(step.targets, self._routing.recorded())


Decoder: TypeAlias = "PlainDecoder | FusedDecoder | RecordingDecoder"


class FusedDecoder:
    """The methods of `PlainDecoder`, with fused operations."""

    def __init__(self, model: PreTrainedModel, ops: Ops) -> None:
        self._ops = ops
        base: Any = model.base_model
        self._base: Any = base
        self._head: Any = model.get_output_embeddings()
        self._is_dense = [hasattr(layer.mlp, "gate_proj") for layer in base.layers]
        self._windows = [_window_of(layer.self_attn) for layer in base.layers]
        self._small_batch = SmallBatch(model, ops, self._windows) if SmallBatch.supports(model, ops) else None

    def fill(self, tokens: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> None:
        self._hidden(tokens, positions, step)

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, step: PagedStep
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        hidden = self._hidden(tokens, positions, step)
        for first in range(0, len(hidden), _LOGIT_ROWS):
            part = slice(first, first + _LOGIT_ROWS)
            yield part, self._head(hidden[part])

    def _hidden(self, tokens: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> torch.Tensor:
        if self._small_batch is not None and self._small_batch.takes(tokens.shape[0], step):
            return self._small_batch.hidden(tokens, positions, step)
        base = self._base
        residual = base.embed_tokens(tokens)
        cosine, sine = base.rotary_emb(residual.unsqueeze(0), positions.unsqueeze(0))
        rotation = (cosine[0], sine[0])
        layers = base.layers
        norms = [*(layer.input_layernorm for layer in layers[1:]), base.norm]
        first = layers[0].input_layernorm
        hidden = self._ops.rms_norm(residual, first.weight, first.variance_epsilon)
        for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
            attended = self._attention(index, layer.self_attn, hidden, rotation, step)
            hidden = self._into_residual(layer.self_attn.o_proj, attended, residual, layer.post_attention_layernorm)
            if not self._is_dense[index]:
                experts = layer.mlp(hidden[None])[0]
                hidden = self._ops.add_rms_norm(experts, residual, next_norm.weight, next_norm.variance_epsilon)
                continue
            hidden = self._into_residual(layer.mlp.down_proj, self._gated(layer.mlp, hidden), residual, next_norm)
        return hidden

    def _attention(
        self,
        index: int,
        module: Any,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        step: PagedStep,
    ) -> torch.Tensor:
        projections = (module.q_proj, module.k_proj, module.v_proj)
        query, key, value = self._ops.project_qkv(
            hidden, [linear.weight for linear in projections], [linear.bias for linear in projections]
        )
        query_norm = getattr(module, "q_norm", None)
        key_norm = getattr(module, "k_norm", None)
        self._ops.rotate_and_store(
            query,
            key,
            value,
            step.pool.keys[index],
            step.pool.values[index],
            step.targets,
            rotation,
            query_norm=None if query_norm is None else query_norm.weight,
            key_norm=None if key_norm is None else key_norm.weight,
            eps=0.0 if query_norm is None else query_norm.variance_epsilon,
        )
        return step.attention(index, query, module.scaling, self._windows[index])

    def _gated(self, module: Any, hidden: torch.Tensor) -> torch.Tensor:
        if module.gate_proj.bias is not None:
            return F.silu(module.gate_proj(hidden)) * module.up_proj(hidden)
        return self._ops.gated(hidden, module.gate_proj.weight, module.up_proj.weight)

    def _into_residual(self, linear: Any, x: torch.Tensor, residual: torch.Tensor, norm: Any) -> torch.Tensor:
        """Add linear(x) to the residual in place, and norm it."""
        if linear.bias is not None:
            return self._ops.add_rms_norm(linear(x), residual, norm.weight, norm.variance_epsilon)
        return self._ops.linear_add_norm(x, linear.weight, residual, norm.weight, norm.variance_epsilon)


def _window_of(attention: Any) -> int | None:
    """What the module's own forward tells attention. Mistral and Mixtral read their config; Llama has no window."""
    if type(attention).__name__ in ("MistralAttention", "MixtralAttention"):
        return getattr(attention.config, "sliding_window", None)
    return getattr(attention, "sliding_window", None)
