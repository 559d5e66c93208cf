"""The divergence from a teacher over the whole vocabulary, chunk by chunk, against full softmaxes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dovetail.algorithms.distillation import vocabulary_divergence
from dovetail.models.policy import PolicyModel
from dovetail.models.vocabulary_divergence import OutputLayer, Teacher, divergence_from, load_output_layer
from tests.models.tiny import save_tiny_model, tiny_model

pytestmark = pytest.mark.unit

ROWS, STUDENT, TEACHER = 7, (20, 8), (23, 12)
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
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    ids = torch.arange(3, 15).view(2, 6) * mask
    wanted = torch.zeros(2, 6, dtype=torch.bool)
    wanted[:, 3:] = True
    values = {}
    for packed in (True, False):
        student = PolicyModel(tiny_model("qwen2", seed=0), use_remove_padding=packed, head_chunk_size=3)
        teacher = PolicyModel(tiny_model("qwen2", seed=1), use_remove_padding=packed)
        with torch.no_grad():
            hidden = teacher(ids, mask, token_mask=wanted, need_hidden=True).hidden
            frozen = Teacher(OutputLayer(teacher.hf_model.get_output_embeddings().weight), hidden=hidden)
            values[packed] = student(ids, mask, token_mask=wanted, temperature=0.9, teacher=frozen).divergence
            itself = replace(frozen, layer=OutputLayer(student.hf_model.get_output_embeddings().weight))
            itself = replace(itself, hidden=student(ids, mask, token_mask=wanted, need_hidden=True).hidden)
            none = student(ids, mask, token_mask=wanted, temperature=0.9, teacher=itself).divergence
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
            hidden = teacher(ids, mask, token_mask=wanted, need_hidden=True).hidden
            frozen = Teacher(OutputLayer(teacher.hf_model.get_output_embeddings().weight), hidden=hidden)
            values.append(student(ids, mask, token_mask=wanted, teacher=frozen).divergence)
    torch.testing.assert_close(values[0], values[1], atol=1e-6, rtol=1e-5)
    assert (values[0][wanted] > 1e-3).all()


@pytest.mark.parametrize("tied", [True, False])
def test_the_output_layer_of_a_folder_is_read_alone(tmp_path: Path, tied: bool) -> None:
    folder = save_tiny_model("qwen2", tmp_path, tie_word_embeddings=tied)
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    layer = load_output_layer(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(layer.weight, model.get_output_embeddings().weight)
    assert (layer.bias, layer.logit_scale, layer.softcap) == (None, 1.0, None)
