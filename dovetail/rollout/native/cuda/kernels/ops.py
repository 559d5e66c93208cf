"""The operations of the paged batch. A test may give others, under the same names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeAlias

Ops: TypeAlias = Any
"""The functions of `triton_ops`; `small_batch` is the module of those kernels, or None."""


def triton_ops() -> Ops:
    from dovetail.rollout.native.cuda.kernels import attention, layer, linear, rows, sampling, small_batch

    return SimpleNamespace(
        decode_attention=attention.decode_attention,
        prefill_attention=attention.prefill_attention,
        rms_norm=layer.rms_norm,
        add_rms_norm=layer.add_rms_norm,
        rotate_and_store=layer.rotate_and_store,
        project_qkv=linear.project_qkv,
        gated=linear.gated,
        linear_add_norm=linear.linear_add_norm,
        draw=sampling.draw,
        begin_rows=rows.begin_rows,
        end_rows=rows.end_rows,
        small_batch=small_batch,
    )
