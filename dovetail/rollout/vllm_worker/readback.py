"""Read a weight back out of vLLM's model under its Hugging Face name, to prove that an update took effect.

On CPU vLLM packs every linear layer for oneDNN and empties the parameter, so the layer is asked instead: what it makes
of the identity matrix is its weight, to the bit. Whole weights only: a tensor-parallel worker has none to show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


@torch.no_grad()
def read_weight(model: nn.Module, name: str) -> Tensor | None:
    """The tensor the model computes with; None where it is quantised, or this module does not know how to look."""
    path, _, leaf = name.rpartition(".")
    module, part = _find(model, path)
    if module is None or leaf not in ("weight", "bias"):
        return None
    if leaf == "bias":
        held = getattr(module, "bias", None)
    elif isinstance(module, ParallelLMHead):
        held = _through_identity(module, module.embedding_dim)
    elif isinstance(module, LinearBase):
        if not isinstance(module.quant_method, UnquantizedLinearMethod):
            return None
        held = _through_identity(module, module.input_size)
    else:
        held = getattr(module, "weight", None)
    if held is None or held.is_meta:
        return None
    if isinstance(module, VocabParallelEmbedding):
        return held[: module.org_vocab_size]
    rows = _rows_of(module, part)
    return held if rows is None else held[rows]


def head_names(model: nn.Module) -> list[str]:
    """Weights of the language heads. A tied head is a packed copy on CPU, and goes stale on its own."""
    return [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, ParallelLMHead)]


def _find(model: nn.Module, path: str) -> tuple[nn.Module | None, str]:
    """The module of that name, or the one that holds it together with others (q, k and v in one matrix)."""
    modules = dict(model.named_modules())
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    for known in (path, *_own_names(model, path)):
        if known in modules:
            return modules[known], ""
        parent, _, leaf = known.rpartition(".")
        for joined, parts in packed.items():
            if leaf in parts and f"{parent}.{joined}" in modules:
                return modules[f"{parent}.{joined}"], leaf
    return None, ""


def _own_names(model: nn.Module, path: str) -> list[str]:
    """vLLM's name where it has other prefixes, as for models that see images."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return [] if mapper is None else [name.removesuffix(".weight") for name in mapper.apply_list([f"{path}.weight"])]


def _rows_of(module: nn.Module, part: str) -> slice | None:
    if not part:
        return None
    if isinstance(module, QKVParallelLinear):
        query, value = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        starts = {"q_proj": (0, query), "k_proj": (query, query + value), "v_proj": (query + value, query + 2 * value)}
        return slice(*starts[part]) if part in starts else None
    if isinstance(module, MergedColumnParallelLinear) and part in ("gate_proj", "up_proj"):
        first = module.output_sizes[0]
        return slice(0, first) if part == "gate_proj" else slice(first, first + module.output_sizes[1])
    return None


def _through_identity(module: Any, width: int) -> Tensor:
    weight = getattr(module, "weight", None)
    packed = hasattr(module, "cpu_linear")
    if not packed and weight is not None and weight.numel():
        return weight
    dtype = weight.dtype if weight is not None else torch.get_default_dtype()
    return module.quant_method.apply(module, torch.eye(width, dtype=dtype), None).t()
