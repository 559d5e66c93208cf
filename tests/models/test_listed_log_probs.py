"""Log-probs of listed tokens and the most likely ones, chunk by chunk, against the full softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dovetail.models.head import TokenLists, listed_log_probs
from dovetail.models.policy import PolicyModel
from tests.models.tiny import tiny_model

pytestmark = pytest.mark.unit

ROWS, WIDTH, VOCABULARY, LISTED = 7, 8, 20, 3


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator) for n in (ROWS, VOCABULARY))
    bias = torch.randn(VOCABULARY, generator=generator)
    ids = torch.randint(VOCABULARY, (ROWS, LISTED), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), ids


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_values_and_gradients_are_those_of_the_full_softmax(chunk_size: int, softcap: float | None) -> None:
    hidden, weight, bias, ids = inputs()
    logits = hidden @ weight.T + bias
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    log_p = (logits / 0.7).log_softmax(-1)
    lists = TokenLists(top_k=4, ids=ids)
    top, listed = listed_log_probs(hidden, weight, bias, lists, temperature=0.7, softcap=softcap, chunk_size=chunk_size)
    assert top is not None
    assert listed is not None
    torch.testing.assert_close(listed, log_p.gather(-1, ids))
    expected = log_p.topk(4)
    assert torch.equal(top.ids, expected.indices)
    torch.testing.assert_close(top.log_probs, expected.values)
    assert not top.log_probs.requires_grad
    upstream = torch.randn(ROWS, LISTED, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((listed * upstream).sum(), (hidden, weight, bias))
    right = torch.autograd.grad((log_p.gather(-1, ids) * upstream).sum(), (hidden, weight, bias))
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_a_smaller_vocabulary_has_no_token_beyond_it_and_probabilities_that_add_up() -> None:
    hidden, weight, bias, _ = inputs()
    top, _ = listed_log_probs(hidden, weight, bias, TokenLists(top_k=50, vocab_size=12), temperature=1.0)
    assert top is not None
    assert top.ids.shape == (ROWS, 12)
    assert int(top.ids.max()) < 12
    torch.testing.assert_close(top.log_probs.exp().sum(-1), torch.ones(ROWS))


@pytest.mark.parametrize("packed", [True, False])
def test_lists_of_a_padded_batch_stand_where_their_tokens_do(packed: bool) -> None:
    model = PolicyModel(tiny_model("qwen2"), use_remove_padding=packed, head_chunk_size=3)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    ids = torch.arange(3, 15).view(2, 6) * mask
    wanted = torch.zeros(2, 6, dtype=torch.bool)
    wanted[:, 3:] = True
    lists = TokenLists(top_k=2, ids=torch.stack([ids, ids + 1], dim=-1))
    with torch.no_grad():
        out = model(ids, mask, token_mask=wanted, temperature=0.9, need_best=True, lists=lists)
    # The first listed token is the token itself, and the first of the top ones is the best.
    torch.testing.assert_close(out.listed[..., 0], out.log_probs)
    torch.testing.assert_close(out.top.log_probs[..., 0], out.best)
    assert out.listed.shape == out.top.ids.shape == (2, 6, 2)
    assert not out.listed[:, :3].any()
