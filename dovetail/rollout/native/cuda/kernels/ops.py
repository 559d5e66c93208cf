"""Which implementation of the engine's operations runs on a device: Triton kernels on CUDA, plain PyTorch elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.rollout.native.cuda.kernels import plain


@dataclass(frozen=True, slots=True)
class FewRowsOps:
    """The functions of `kernels.few_rows`, under their names there; there is no plain way, for they change nothing."""

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
    few_rows: FewRowsOps | None = None


def ops_for(device: torch.device) -> Ops:
    return triton_ops() if device.type == "cuda" else plain_ops()


def plain_ops() -> Ops:
    return Ops(
        plain.decode_attention,
        plain.prefill_attention,
        plain.rms_norm,
        plain.add_rms_norm,
        plain.rotate_and_store,
        plain.project_qkv,
        plain.gated,
        plain.linear_add_norm,
        plain.draw,
        plain.begin_rows,
        plain.end_rows,
    )


def triton_ops() -> Ops:
    from dovetail.rollout.native.cuda.kernels import attention, few_rows, layer, linear, rows, sampling

    for_few = FewRowsOps(
        few_rows.MAX_ROWS,
        few_rows.DTYPES,
        few_rows.runs_on,
        few_rows.fits,
        few_rows.head_fits,
        few_rows.embed,
        few_rows.norm_qkv,
        few_rows.norm_gated,
        few_rows.linear_add,
        layer.rms_norm,
    )

    return Ops(
        attention.decode_attention,
        attention.prefill_attention,
        layer.rms_norm,
        layer.add_rms_norm,
        layer.rotate_and_store,
        linear.project_qkv,
        linear.gated,
        linear.linear_add_norm,
        sampling.draw,
        rows.begin_rows,
        rows.end_rows,
        for_few,
    )
