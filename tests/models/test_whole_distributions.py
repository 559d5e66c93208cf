"""Log-probs of listed and most likely tokens, and divergence from a teacher, in chunks, against the full softmax."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dovetail.algorithms.distillation import vocabulary_divergence
from dovetail.models.head import TokenLists, largest, listed_log_probs
from dovetail.models.policy import PolicyModel
from dovetail.models.vocabulary_divergence import OutputLayer, Teacher, divergence_from, load_output_layer
from tests.models.tiny import run_model, save_tiny_model, tiny_model

pytestmark = pytest.mark.unit

ROWS, WIDTH, VOCABULARY, LISTED = 7, 8, 20, 3


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator) for n in (ROWS, VOCABULARY))
    bias = torch.randn(VOCABULARY, generator=generator)
    ids = torch.randint(VOCABULARY, (ROWS, LISTED), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), ids


def padded_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, their mask, and which tokens are wanted."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    wanted = torch.zeros(2, 6, dtype=torch.bool)
    wanted[:, 3:] = True
    return torch.arange(3, 15).view(2, 6) * mask, mask, wanted


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_values_and_gradients_are_those_of_the_full_softmax(chunk_size: int, softcap: float | None) -> None:
    hidden, weight, bias, ids = inputs()
    logits = hidden @ weight.T + bias
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    log_p = (logits / 0.7).log_softmax(-1)
    lists = TokenLists(top_k=4, ids=ids)
    top, listed, overlap = listed_log_probs(
        hidden, weight, bias, lists, temperature=0.7, softcap=softcap, chunk_size=chunk_size
    )
    assert top is not None
    assert listed is not None
    torch.testing.assert_close(listed, log_p.gather(-1, ids))
    likely = log_p.topk(LISTED).indices
    assert overlap.tolist() == pytest.approx(
        [sum(int(n) in set(row) for n in own) / LISTED for own, row in zip(ids, likely.tolist(), strict=True)]
    )
    expected = log_p.topk(4)
    assert torch.equal(top.ids, expected.indices)
    torch.testing.assert_close(top.log_probs, expected.values)
    assert not top.log_probs.requires_grad
    upstream = torch.randn(ROWS, LISTED, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((listed * upstream).sum(), (hidden, weight, bias))
    right = torch.autograd.grad((log_p.gather(-1, ids) * upstream).sum(), (hidden, weight, bias))
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [4 * 3 * 128, 1600, 5000])
def test_the_largest_of_blocks_are_those_of_all_numbers(size: int) -> None:
    """In one block, in the tail behind the last block, and anywhere; some are infinite, as hidden tokens are."""
    scores = torch.rand(0, size), torch.randperm(6 * size, generator=torch.Generator().manual_seed(0)).view(6, size) / 2
    scores[1][0, :3] += 1e6
    scores[1][1, -3:] += 1e6
    scores[1][2, 7:] = -torch.inf
    for numbers in scores:
        values, ids = largest(numbers, 3)
        assert torch.equal(values, numbers.topk(3).values)
        assert torch.equal(numbers.gather(-1, ids), values)


def test_a_smaller_vocabulary_has_no_token_beyond_it_and_probabilities_that_add_up() -> None:
    hidden, weight, bias, _ = inputs()
    top, _, _ = listed_log_probs(hidden, weight, bias, TokenLists(top_k=50, vocab_size=12), temperature=1.0)
    assert top is not None
    assert top.ids.shape == (ROWS, 12)
    assert int(top.ids.max()) < 12
    torch.testing.assert_close(top.log_probs.exp().sum(-1), torch.ones(ROWS))


@pytest.mark.parametrize("packed", [True, False])
def test_lists_of_a_padded_batch_stand_where_their_tokens_do(packed: bool) -> None:
    model = PolicyModel(tiny_model("qwen2"), use_remove_padding=packed, head_chunk_size=3)
    ids, mask, wanted = padded_batch()
    lists = TokenLists(top_k=2, ids=torch.stack([ids, ids + 1], dim=-1))
    with torch.no_grad():
        out = run_model(model, ids, mask, token_mask=wanted, temperature=0.9, need_best=True, lists=lists)
    # The first listed token is the token itself, and the first of the top ones is the best.
    torch.testing.assert_close(out.listed[..., 0], out.log_probs)
    torch.testing.assert_close(out.top.log_probs[..., 0], out.best)
    assert out.listed.shape == out.top.ids.shape == (2, 6, 2)
    assert not out.listed[:, :3].any()


STUDENT, TEACHER = (20, 8), (23, 12)
"""Vocabulary and width of the two models."""


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_values_and_gradients_are_those_of_the_full_softmaxes(chunk_size: int, kind: str) -> None:
    hidden, weight = drawn(ROWS, STUDENT[1], seed=0).requires_grad_(), drawn(*STUDENT, seed=1).requires_grad_()
    bias = drawn(STUDENT[0], seed=2).requires_grad_()
    teachers, frozen = drawn(ROWS, TEACHER[1], seed=3), OutputLayer(drawn(*TEACHER, seed=4), softcap=2.0)
    own = OutputLayer(weight, bias, logit_scale=0.5)
    teacher = Teacher(frozen, kind, teachers)  # type: ignore[arg-type]
    found = divergence_from(hidden, own, teacher, temperature=0.7, chunk_size=chunk_size)
    # The teacher's three tokens that the student does not have are left out of its distribution.
    log_p = ((hidden @ weight.T + bias) * 0.5 / 0.7).log_softmax(-1)
    log_q = (2.0 * torch.tanh(teachers @ frozen.weight.T / 2.0) / 0.7)[:, : STUDENT[0]].log_softmax(-1)
    right = vocabulary_divergence(log_p, log_q, kind)  # type: ignore[arg-type]
    torch.testing.assert_close(found, right)
    upstream = drawn(ROWS, seed=5)
    mine = torch.autograd.grad((found * upstream).sum(), (hidden, weight, bias))
    theirs = torch.autograd.grad((right * upstream).sum(), (hidden, weight, bias))
    for gradient, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)


def test_packed_and_padded_batches_have_the_same_divergence_and_none_on_unwanted_tokens() -> None:
    ids, mask, wanted = padded_batch()
    values = {}
    for packed in (True, False):
        student = PolicyModel(tiny_model("qwen2", seed=0), use_remove_padding=packed, head_chunk_size=3)
        teacher = PolicyModel(tiny_model("qwen2", seed=1), use_remove_padding=packed)
        with torch.no_grad():
            hidden = run_model(teacher, ids, mask, token_mask=wanted, need_hidden=True).hidden
            frozen = Teacher(OutputLayer(teacher.hf_model.get_output_embeddings().weight), hidden=hidden)
            values[packed] = run_model(
                student, ids, mask, token_mask=wanted, temperature=0.9, teacher=frozen
            ).divergence
            itself = replace(frozen, layer=OutputLayer(student.hf_model.get_output_embeddings().weight))
            itself = replace(itself, hidden=run_model(student, ids, mask, token_mask=wanted, need_hidden=True).hidden)
            none = run_model(student, ids, mask, token_mask=wanted, temperature=0.9, teacher=itself).divergence
        assert none.abs().max() < 1e-6
    torch.testing.assert_close(values[True], values[False], atol=1e-6, rtol=1e-5)
    counted = wanted & mask.bool()
    assert (values[True][counted] > 1e-3).all()
    assert not values[True][~counted].any()


def test_a_prompt_that_is_computed_once_gives_the_same_divergence() -> None:
    prompt = torch.arange(3, 9).expand(2, 6)
    ids = torch.cat([prompt, torch.tensor([[20, 21, 22], [30, 31, 32]])], dim=1)
    mask, wanted = torch.ones_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    wanted[:, 6:] = True
    values = []
    for share in (True, False):
        student, teacher = (PolicyModel(tiny_model("qwen2", seed=seed), share_prefixes=share) for seed in (0, 1))
        with torch.no_grad():
            hidden = run_model(teacher, ids, mask, token_mask=wanted, need_hidden=True).hidden
            frozen = Teacher(OutputLayer(teacher.hf_model.get_output_embeddings().weight), hidden=hidden)
            values.append(run_model(student, ids, mask, token_mask=wanted, teacher=frozen).divergence)
    torch.testing.assert_close(values[0], values[1], atol=1e-6, rtol=1e-5)
    assert (values[0][wanted] > 1e-3).all()


@pytest.mark.parametrize("tied", [True, False])
def test_the_output_layer_of_a_folder_is_read_alone(tmp_path: Path, tied: bool) -> None:
    folder = save_tiny_model("qwen2", tmp_path, tie_word_embeddings=tied)
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    layer = load_output_layer(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(layer.weight, model.get_output_embeddings().weight)
    assert (layer.bias, layer.logit_scale, layer.softcap) == (None, 1.0, None)
