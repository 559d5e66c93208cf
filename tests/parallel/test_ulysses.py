"""Ulysses collectives on real processes: layouts, gradients, and who owns which gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dovetail.parallel.ulysses import (
    gather_heads_scatter_seq,
    gather_outputs,
    gather_seq_scatter_heads,
    get_ulysses_group,
    num_kv_repeats,
    pad_to_multiple,
    scatter_qkv_heads,
    slice_inputs,
    ulysses_group,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def _full(*shape: int) -> torch.Tensor:
    return torch.arange(torch.tensor(shape).prod().item(), dtype=torch.float64).view(*shape)


def _swap(rank: int, size: int) -> None:
    full = _full(2, 8, 12, 3)  # batch, heads, tokens, channels
    with ulysses_group(dist.group.WORLD):
        mine = slice_inputs(full, 2).clone().requires_grad_()
        swapped = gather_seq_scatter_heads(mine, seq_dim=2, head_dim=1)
        heads = 8 // size
        assert torch.equal(swapped, full[:, rank * heads : (rank + 1) * heads])
        back = gather_heads_scatter_seq(swapped, head_dim=1, seq_dim=2)
        assert torch.equal(back, mine)
        weight = _full(*back.shape) + rank
        (back * weight).sum().backward()
        assert torch.equal(mine.grad, weight)


@pytest.mark.parametrize("size", [2, 4])
def test_swapping_tokens_for_heads_and_back_is_the_identity_in_both_directions(size: int) -> None:
    run_ranks(_swap, size)


def _padding(rank: int, size: int) -> None:
    full = _full(7, 4)  # tokens, heads
    padded = pad_to_multiple(full, 0, size)
    mine = slice_inputs(padded, 0, dist.group.WORLD)
    swapped = gather_seq_scatter_heads(mine, 0, 1, unpadded_dim_size=7, group=dist.group.WORLD)
    assert torch.equal(swapped, full[:, rank * 2 : rank * 2 + 2])
    assert torch.equal(gather_heads_scatter_seq(swapped, 1, 0, group=dist.group.WORLD), mine)


def test_padding_is_cut_on_the_way_in_and_added_on_the_way_back() -> None:
    run_ranks(_padding, 2)


def _gather(rank: int, size: int) -> list[float]:
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))
    tokens = _full(6, 2)
    local = slice_inputs(tokens, 0, dist.group.WORLD) @ weight
    outputs = gather_outputs(local, 0, dist.group.WORLD)
    assert torch.equal(outputs, tokens @ weight)
    outputs.square().sum().backward()
    dist.all_reduce(weight.grad)
    return weight.grad.tolist()


def test_gradients_of_a_loss_computed_on_every_rank_sum_to_the_gradient_once() -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))
    (_full(6, 2) @ weight).square().sum().backward()
    for grad in run_ranks(_gather, 2):
        assert grad == pytest.approx(weight.grad.tolist())


def _few_kv_heads(rank: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 8, 8, 4, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(1, 2, 8, 4, generator=generator, dtype=torch.float64) for _ in range(2))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    whole = [t.clone().requires_grad_() for t in (query, key, value)]
    expected = attend(*whole)
    expected.square().sum().backward()

    group = dist.group.WORLD
    mine = [slice_inputs(t, 2, group).clone().requires_grad_() for t in (query, key, value)]
    out = attend(*scatter_qkv_heads(*mine, seq_dim=2, head_dim=1, group=group))
    out = gather_heads_scatter_seq(out, head_dim=1, seq_dim=2, group=group)
    torch.testing.assert_close(out, slice_inputs(expected, 2, group))
    out.square().sum().backward()
    for got, want in zip(mine, whole, strict=True):
        torch.testing.assert_close(got.grad, slice_inputs(want.grad, 2, group))


def test_two_kv_heads_on_four_ranks_give_the_same_attention_and_gradients() -> None:
    run_ranks(_few_kv_heads, 4)


def test_kv_repeats_are_the_fewest_that_give_every_rank_its_heads() -> None:
    assert [num_kv_repeats(8, 2, 4), num_kv_repeats(8, 4, 2), num_kv_repeats(12, 3, 2)] == [2, 1, 2]
    with pytest.raises(ValueError, match=r"multiple of lcm\(3, 2\) = 6"):
        num_kv_repeats(9, 3, 2)


def _context(rank: int, size: int) -> None:
    assert get_ulysses_group() is None
    with ulysses_group(dist.group.WORLD):
        assert get_ulysses_group() is dist.group.WORLD
        with ulysses_group(None):
            assert get_ulysses_group() is None
        assert get_ulysses_group() is dist.group.WORLD
    assert get_ulysses_group() is None


def test_the_group_is_active_inside_its_block_only() -> None:
    run_ranks(_context, 2)
