"""Core attention for Megatron in plain torch: causal, grouped heads, packed (THD) or padded rows, context parallel.

Packed rows: on CUDA in half precision PyTorch's varlen kernel, elsewhere one SDPA call for each sequence; a query never
meets a key of another sequence, and no mask of all tokens by all tokens is built. Value heads may be of another size
than query heads (MLA). Dropout is refused.

Context parallel: a rank holds two chunks of every sequence, `r` and `2 cp - 1 - r` of `2 cp` (zig-zag, so that all
ranks have as much to do). Keys and values are gathered, in backward their gradients scattered; each chunk then meets
the keys up to its own end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from dovetail.models.attention import varlen_options


@dataclass(frozen=True)
class Piece:
    """Consecutive queries that meet the same sequence: `num_queries` from `query` on, against the keys from `key` on.

    The last query is at the place of the last key, so the mask is causal from the lower right corner.
    """

    query: int
    num_queries: int
    key: int
    num_keys: int


class AttentionPlan:
    """What all layers need to know of one packed row. Made once for each: a layer must not wait for the device."""

    def __init__(self, lengths: list[int], cp_size: int, cp_rank: int, device: torch.device) -> None:
        self.pieces = attention_pieces(lengths, cp_size, cp_rank)
        self.row_order: Tensor | None = None
        """Where in what all ranks hold together the tokens of the row are, one after the other."""
        if cp_size > 1:
            held = torch.cat([zigzag_places(lengths, cp_size, rank) for rank in range(cp_size)])
            self.row_order = held.argsort().to(device)
        self._device = device

    @cached_property
    def key_runs(self) -> Tensor | None:
        """The keys of all pieces one after the other, where pieces share keys; the varlen kernel wants runs."""
        if all(piece.num_queries == piece.num_keys for piece in self.pieces):
            return None
        return torch.cat([torch.arange(p.key, p.key + p.num_keys) for p in self.pieces]).to(self._device)

    @cached_property
    def query_offsets(self) -> Tensor:
        return _offsets([piece.num_queries for piece in self.pieces], self._device)

    @cached_property
    def key_offsets(self) -> Tensor:
        return _offsets([piece.num_keys for piece in self.pieces], self._device)

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The most queries and the most keys of a piece."""
        return max(piece.num_queries for piece in self.pieces), max(piece.num_keys for piece in self.pieces)


class TorchCoreAttention(MegatronModule):
    """What Megatron calls between the projections. Stateless."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"attention_dropout={dropout} is not computed without Transformer Engine; use 0.")
        if config.window_size is not None:
            raise ValueError(
                f"window_size={config.window_size} is not computed without Transformer Engine; use a model without "
                "sliding windows, or strategy=fsdp2."
            )
        self.softmax_scale = softmax_scale
        cp_group = getattr(pg_collection, "cp", None)
        self.cp_group = parallel_state.get_context_parallel_group() if cp_group is None else cp_group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """`[t, heads, d]` packed, else `[s, b, heads, d]`; returns `[t, heads * d_v]` or `[s, b, heads * d_v]`."""
        assert attention_bias is None, "no model built here has an attention bias"
        if packed_seq_params is None:
            return self._padded(query, key, value)
        plan = self._plan(packed_seq_params, query.device)
        if plan.row_order is not None:
            # Backward adds up what the ranks' queries say of this rank's keys.
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)[plan.row_order]
                for x in (key, value)
            )
        kernel = _varlen if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else _by_piece
        return kernel(query, key, value, plan, self.softmax_scale).flatten(1)

    def _plan(self, packed_seq_params: Any, device: torch.device) -> AttentionPlan:
        plan = getattr(packed_seq_params, "attention_plan", None)
        if plan is None:
            lengths = sequence_lengths(packed_seq_params)
            plan = AttentionPlan(lengths, self.cp_group.size(), self.cp_group.rank(), device)
            packed_seq_params.attention_plan = plan
        return plan

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.cp_group.size() > 1:
            raise ValueError("context parallel attention takes packed sequences only")
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def sequence_lengths(packed_seq_params: Any) -> list[int]:
    """Tokens of each sequence with its padding, over all context-parallel ranks."""
    padded = packed_seq_params.cu_seqlens_q_padded
    offsets = packed_seq_params.cu_seqlens_q if padded is None else padded
    return offsets.diff().tolist()


def zigzag_places(lengths: list[int], cp_size: int, cp_rank: int) -> Tensor:
    """Where in the whole packed row this rank's tokens are, in the order in which it holds them."""
    positions, start = [], 0
    for length in lengths:
        chunk = length // (2 * cp_size)
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            positions.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
        start += length
    return torch.cat(positions)


def attention_pieces(lengths: list[int], cp_size: int, cp_rank: int) -> list[Piece]:
    """What this rank's queries meet. Without context parallel every sequence is one piece."""
    pieces, query, key = [], 0, 0
    for length in lengths:
        if cp_size == 1:
            pieces.append(Piece(query, length, key, length))
        else:
            chunk = length // (2 * cp_size)
            first, second = cp_rank, 2 * cp_size - 1 - cp_rank
            pieces.append(Piece(query, chunk, key, (first + 1) * chunk))
            pieces.append(Piece(query + chunk, chunk, key, (second + 1) * chunk))
        query += length // cp_size
        key += length
    return pieces


def _by_piece(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float | None) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    outs = []
    for piece in plan.pieces:
        square = piece.num_queries == piece.num_keys
        out = F.scaled_dot_product_attention(
            q[:, :, piece.query : piece.query + piece.num_queries],
            k[:, :, piece.key : piece.key + piece.num_keys],
            v[:, :, piece.key : piece.key + piece.num_keys],
            attn_mask=None if square else _lower_right(piece, query.device),
            is_causal=square,
            scale=scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        outs.append(out)
    return torch.cat(outs, dim=2).squeeze(0).transpose(0, 1)


def _lower_right(piece: Piece, device: torch.device) -> Tensor:
    rows = torch.arange(piece.num_keys - piece.num_queries, piece.num_keys, device=device)
    return torch.arange(piece.num_keys, device=device) <= rows[:, None]


def _varlen(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    value_size, missing = value.size(-1), query.size(-1) - value.size(-1)
    if missing:  # the kernel takes one head size; zero columns stay zero
        value = F.pad(value, (0, missing))
    if plan.key_runs is not None:
        key, value = key[plan.key_runs], value[plan.key_runs]
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        plan.query_offsets,
        plan.key_offsets,
        *plan.longest,
        scale=query.size(-1) ** -0.5 if scale is None else scale,
        **varlen_options(None),
    )
    assert isinstance(out, Tensor), "only a request for the normaliser makes varlen_attn return a pair"
    return out[..., :value_size]


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
