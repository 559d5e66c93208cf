"""Log-probs, entropies and their gradients over a vocabulary split between two ranks are those of the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.backends.megatron.vocab_parallel import VocabShard, vocab_parallel_log_prob
from dovetail.models.head import plain_log_prob_entropy
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

ROWS, HIDDEN, VOCAB, PADDED = 7, 16, 29, 30
TEMPERATURE = 0.7
CASES: dict[str, dict[str, Any]] = {
    "plain": {"need_entropy": True},
    "without entropy": {"need_entropy": False},
    "in chunks of 3 rows": {"need_entropy": True, "chunk_size": 3, "need_sum_squares": True},
    "with sums of squares": {"need_entropy": False, "need_sum_squares": True},
    "in one large chunk": {"need_entropy": True, "chunk_size": 100},
}


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return run_ranks(compute, 2)


@pytest.mark.parametrize("name", CASES)
def test_a_split_vocabulary_gives_the_numbers_of_a_whole_one(name: str, by_rank: list[dict[str, Any]]) -> None:
    hidden, weight, labels = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = hidden @ weight[:VOCAB].t()
    expected = plain_log_prob_entropy(logits, labels, temperature=TEMPERATURE)
    assert expected.entropy is not None
    factors = loss_factors()
    loss = (expected.log_probs * factors[0]).sum()
    if CASES[name]["need_entropy"]:
        loss = loss + (expected.entropy * factors[1]).sum()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    best = (logits / TEMPERATURE).log_softmax(-1).amax(-1)
    # Each rank has the gradient of its own rows of the head, and its part of the hidden states' gradient.
    torch.testing.assert_close(sum(found[name]["hidden"] for found in by_rank), hidden.grad, atol=1e-6, rtol=0)
    for rank, found in enumerate(by_rank):
        values = found[name]["values"]
        torch.testing.assert_close(values[0], expected.log_probs.detach(), atol=1e-6, rtol=0)
        torch.testing.assert_close(values[2], best.detach(), atol=1e-6, rtol=0)
        if CASES[name]["need_entropy"]:
            torch.testing.assert_close(values[1], expected.entropy.detach(), atol=1e-6, rtol=0)
        if CASES[name].get("need_sum_squares"):
            squares = (logits / TEMPERATURE).softmax(-1).square().sum(-1)
            torch.testing.assert_close(values[3], squares.detach(), atol=1e-6, rtol=0)
        own = weight.grad[rank * PADDED // 2 : (rank + 1) * PADDED // 2]
        torch.testing.assert_close(found[name]["weight"], own, atol=1e-6, rtol=0)


def test_no_rows_give_no_numbers_and_zero_gradients(by_rank: list[dict[str, Any]]) -> None:
    for found in by_rank:
        assert found["no rows"]["values"].shape == (4, 0)
        assert not found["no rows"]["weight"].any()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = 0.2 * torch.randn(PADDED, HIDDEN, generator=generator)
    weight[VOCAB:] = 50.0  # rows that pad the vocabulary must never count, whatever is in them
    return hidden, weight, torch.randint(VOCAB, (ROWS,), generator=generator)


def loss_factors() -> Tensor:
    return torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1))


def compute(rank: int, world_size: int) -> dict[str, Any]:
    assert dist.group.WORLD is not None
    size = PADDED // world_size
    shard = VocabShard(dist.group.WORLD, rank * size, (rank + 1) * size, VOCAB)
    found = {}
    cases: dict[str, dict[str, Any]] = {**CASES, "no rows": {"need_entropy": True, "chunk_size": 2}}
    for name, options in cases.items():
        hidden, weight, labels = inputs()
        if name == "no rows":
            hidden, labels = hidden[:0], labels[:0]
        hidden, own = hidden.requires_grad_(), weight[shard.first : shard.last].clone().requires_grad_()
        values = vocab_parallel_log_prob(hidden, own, labels, shard, temperature=TEMPERATURE, **options)
        factors = loss_factors()[:, : len(labels)]
        loss = (values[0] * factors[0]).sum()
        if options["need_entropy"]:
            loss = loss + (values[1] * factors[1]).sum()
        loss.backward()
        found[name] = {"values": values.detach(), "hidden": hidden.grad, "weight": own.grad}
    return found
