"""Which implementation of the engine's operations runs on a device: Triton kernels on CUDA, plain PyTorch elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import torch

from dovetail.rollout.native.cuda.kernels import plain


@dataclass(frozen=True, slots=True)
class SmallBatchOps:
    """The functions of `kernels.small_batch`, under their names there; no plain ones, for they change no result."""

    max_rows: int
    dtypes: Collection[torch.dtype]
    runs_on: Callable[[torch.device], bool]
    fits: Callable[..., bool]
    head_fits: Callable[[int], bool]
    embed: Callable[..., tuple[torch.Tensor, Any]]
    norm_qkv: Callable[..., torch.Tensor]
    norm_gated: Callable[..., torch.Tensor]
    linear_add: Callable[..., Any]
    rms_norm: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ops:
    """The functions of `kernels.plain`, under their names there."""

    decode_attention: Callable[..., torch.Tensor]
    prefill_attention: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., torch.Tensor]
    rotate_and_store: Callable[..., None]
    project_qkv: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    gated: Callable[..., torch.Tensor]
    linear_add_norm: Callable[..., torch.Tensor]
    draw: Callable[..., None]
    begin_rows: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
    end_rows: Callable[..., None]
    small_batch: SmallBatchOps | None = None


def ops_for(device: torch.device) -> Ops:
    return triton_ops() if device.type == "cuda" else plain_ops()


def plain_ops() -> Ops:
    return Ops(**_named(Ops, plain))


def triton_ops() -> Ops:
    from dovetail.rollout.native.cuda.kernels import attention, layer, linear, rows, sampling, small_batch

    for_small_batches = SmallBatchOps(
        max_rows=small_batch.MAX_ROWS, dtypes=small_batch.DTYPES, **_named(SmallBatchOps, small_batch, layer)
    )
    return Ops(small_batch=for_small_batches, **_named(Ops, attention, layer, linear, rows, sampling))


def _named(ops: type, *modules: ModuleType) -> dict[str, Any]:
    """What these modules define under the names of the fields of `ops`."""
    functions = {}
    for field in fields(ops):
        for module in modules:
            function = getattr(module, field.name, None)
            if getattr(function, "__module__", None) == module.__name__:
                functions[field.name] = function
    return functions
