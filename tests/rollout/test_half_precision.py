"""Weights in half precision: rounded the same everywhere, and packed products on CPU that follow every change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dovetail.models.weights import to_checkpoint_tensors
from dovetail.rollout import SamplingParams
from dovetail.rollout.native import engine as native
from dovetail.rollout.native.engine import NativeEngine
from dovetail.rollout.native.packed_linear import PackedLinear, pack_linears
from dovetail.weight_sync import in_engine_dtype
from tests.models.tiny import save_tiny_model, tiny_model
from tests.rollout.test_native_engine import prompts, requests, tokens

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
SAMPLING = SamplingParams(max_new_tokens=24, ignore_eos=True)


def copies(engine: NativeEngine) -> list[bool]:
    return [linear._packed is not None for linear in engine._packed]


def plain_engine(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> NativeEngine:
    with monkeypatch.context() as patched:
        patched.setattr(native, "pack_linears", lambda model, device: [])
        return NativeEngine(model)


@pytest.mark.skipif(
    not pack_linears(tiny_model("llama").to(torch.bfloat16), CPU), reason="this CPU has no instructions for bfloat16"
)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_packed_products_give_the_samples_and_log_probs_of_plain_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name).to(torch.bfloat16)
    plain, packed = plain_engine(model, monkeypatch), NativeEngine(model)
    assert packed._packed
    assert not plain._packed
    ours, theirs = (engine.generate(requests(prompts(5, seed=3), SAMPLING)) for engine in (packed, plain))
    assert all(copies(packed))
    assert tokens(ours) == tokens(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.log_probs == pytest.approx(other.log_probs, abs=1e-6)


def test_packed_products_follow_a_change_of_shared_weights_and_are_dropped_by_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    engine = NativeEngine(model)
    asked = requests(prompts(4, seed=5), SAMPLING)
    before = tokens(engine.generate(asked))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    engine.update_weights(None, 2)
    assert not any(copies(engine))
    after = tokens(engine.generate(asked))
    assert after != before
    assert after == tokens(plain_engine(model, monkeypatch).generate(asked))
    engine.sleep()
    assert not any(copies(engine))
    engine.wake()
    assert tokens(engine.generate(asked)) == after


def test_float32_models_and_the_trainers_own_module_stay_plain() -> None:
    model = tiny_model("llama")
    assert pack_linears(model, CPU) == []
    half = tiny_model("llama").to(torch.bfloat16)
    NativeEngine(half)
    assert not [module for module in half.modules() if isinstance(module, PackedLinear)]


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_weights_that_arrive_rounded_are_bit_equal_to_weights_rounded_by_the_engine(
    family: str, tmp_path: Path
) -> None:
    model = tiny_model(family, seed=1).float()
    stream = [(name, tensor.detach()) for name, tensor in to_checkpoint_tensors(model, model.named_parameters())]
    engine = NativeEngine(save_tiny_model(family, tmp_path, tokenizer=False), dtype=torch.bfloat16)
    names = [name for name, _ in stream]
    engine.update_weights(stream, 1)
    rounded_there = engine.weight_checksums(names)
    engine.update_weights([(name, torch.zeros_like(tensor)) for name, tensor in stream], 2)
    assert engine.weight_checksums(names) != rounded_there
    sent = list(in_engine_dtype(stream, "bfloat16"))
    engine.update_weights(sent, 3)
    assert engine.weight_checksums(names) == rounded_there
    assert sum(tensor.nbytes for _, tensor in sent) < 0.6 * sum(tensor.nbytes for _, tensor in stream)
