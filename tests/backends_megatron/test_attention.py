"""Packed attention for Megatron equals attention with a full mask: GQA, MLA's head sizes, any context-parallel size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.distributed

LENGTHS = [8, 24, 16]
"""Multiples of 2 x 4, so that up to 4 context-parallel ranks can cut them."""


def tensors(value_size: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (kv_heads, 8), (kv_heads, value_size))
    query, key, value = (torch.randn(sum(LENGTHS), *shape, generator=generator) for shape in shapes)
    return query, key, value


def masked_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One call over the whole row, with a mask that keeps sequences apart."""
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(len(sequence))
    mask = (sequence[:, None] == sequence) & (place[:, None] >= place)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize(("value_size", "kv_heads"), [(8, 4), (8, 2), (6, 4)])
def test_pieces_of_all_ranks_together_are_attention_over_the_row(cp_size: int, value_size: int, kv_heads: int) -> None:
    from dovetail.backends.megatron.attention import AttentionPlan, _by_piece, zigzag_places

    query, key, value = tensors(value_size, kv_heads)
    expected = masked_attention(query, key, value)
    seen = torch.zeros(len(query), dtype=torch.bool)
    for rank in range(cp_size):
        own = zigzag_places(LENGTHS, cp_size, rank) if cp_size > 1 else torch.arange(len(query))
        plan = AttentionPlan(LENGTHS, cp_size, rank, torch.device("cpu"))
        out = _by_piece(query[own], key, value, plan, None)
        torch.testing.assert_close(out, expected[own], atol=1e-6, rtol=0)
        seen[own] = True
        assert sum(piece.num_queries for piece in plan.pieces) == len(own) == len(query) // cp_size
    assert seen.all()


def test_ranks_of_a_zigzag_have_the_same_work() -> None:
    from dovetail.backends.megatron.attention import attention_pieces

    work = [
        sum(piece.num_queries * piece.num_keys for piece in attention_pieces(LENGTHS, 4, rank)) for rank in range(4)
    ]
    assert len(set(work)) == 1


def test_a_sequence_is_padded_to_what_ranks_cut_it_into() -> None:
    from dataclasses import fields

    from dovetail.backends.megatron.layout import MegatronLayout
    from dovetail.backends.megatron.packing import padded_lengths

    def layout(**sizes: int) -> MegatronLayout:
        every = {field.name: sizes.get(field.name, 1) for field in fields(MegatronLayout)}
        return MegatronLayout(**every)  # pyrefly: ignore[bad-argument-type]

    assert padded_lengths([3, 5], layout()) == [3, 5]
    assert padded_lengths([3, 5], layout(tp_size=4)) == [3, 5]
    assert padded_lengths([3, 6], layout(tp_size=4)) == [3, 9]
    assert padded_lengths([3, 5], layout(cp_size=2)) == [4, 8]
    lengths = padded_lengths([3, 5, 6], layout(cp_size=2, tp_size=2))
    assert lengths[:2] == [4, 8]
    assert sum(lengths) // 2 % 2 == 0
