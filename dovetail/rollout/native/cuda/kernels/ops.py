"""The operations of the paged batch. A test may give others, under the same names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from dovetail.models.exact import QUERY_BLOCK, label_log_probs

if TYPE_CHECKING:
    from dovetail.rollout.native.cuda.slots import SlotState

Ops: TypeAlias = Any
"""The functions of `triton_ops`; `small_batch` is the module of those kernels, or None."""


def triton_ops() -> Ops:
    from dovetail.models.kernels.paged_attention import prefill_attention
    from dovetail.rollout.native.cuda.kernels import attention, layer, linear, rows, sampling, small_batch

    return SimpleNamespace(
        decode_attention=attention.decode_attention,
        prefill_attention=prefill_attention,
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


def exact_ops(ops: Ops) -> Ops:
    """`ops` whose attention of decode steps and log-probs are those of `models.exact`, to the bit."""

    def decode_attention(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, slots: torch.Tensor,
        lengths: torch.Tensor, scaling: float, *, num_splits: int = 1, window: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Every row as a prompt's last token."""
        del num_splits  # one program reads all keys of a row, in their order
        rows = torch.arange(slots.shape[0], dtype=torch.int32, device=slots.device)
        segments = torch.zeros((table.shape[0], 3), dtype=torch.int32, device=slots.device)
        # A row without keys, which fills the batch up, reads one of the slot that nobody has.
        segments[slots.long()] = torch.stack([rows, torch.ones_like(rows), lengths.int().clamp(min=1) - 1], dim=1)
        blocks = torch.stack([slots.int(), torch.zeros_like(rows)], dim=1)
        return ops.prefill_attention(
            query, keys, values, table, blocks, segments, scaling, block_size=QUERY_BLOCK, heads_together=True,
            window=window,
        )  # fmt: skip

    def draw(
        logits: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, state: SlotState, tokens: torch.Tensor,
        log_probs: torch.Tensor, *, filtered: bool = False,
    ) -> None:  # fmt: skip
        ops.draw(logits, positions, slots, state, tokens, log_probs, filtered=filtered)
        log_probs.copy_(label_log_probs(logits, tokens, state.temperatures[slots.long()]))

    return SimpleNamespace(**{**vars(ops), "decode_attention": decode_attention, "draw": draw})
