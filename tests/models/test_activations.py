"""Recomputation and offloading change memory, not results."""

from __future__ import annotations

import pytest
import torch

from dovetail.models.activations import activation_offload, enable_gradient_checkpointing
from dovetail.models.policy import PolicyModel
from tests.models.tiny import FAMILIES, image_batch, ragged_batch, run_model, tiny_model

pytestmark = pytest.mark.unit


def _grads(policy: PolicyModel, family: str) -> dict[str, torch.Tensor]:
    batch = image_batch() if family == "qwen2_5_vl" else ragged_batch([5, 12], side="left")
    run_model(policy, **batch).log_probs.square().sum().backward()
    return {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("use_remove_padding", [False, True])
def test_checkpointing_on_equals_off(family: str, use_remove_padding: bool) -> None:
    plain = _grads(PolicyModel(tiny_model(family).train(), use_remove_padding=use_remove_padding), family)
    policy = PolicyModel(tiny_model(family), use_remove_padding=use_remove_padding)
    enable_gradient_checkpointing(policy.hf_model)
    calls = []
    layer = policy.hf_model.base_model.get_decoder().layers[0]
    layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    again = _grads(policy, family)
    assert len(calls) == 2, "the layer runs once more in backward"
    assert plain.keys() == again.keys()
    for name, want in plain.items():
        torch.testing.assert_close(again[name], want, atol=1e-6 * want.abs().max().item() + 1e-8, rtol=1e-5)


def test_offload_leaves_cpu_tensors_where_they_are_and_results_unchanged() -> None:
    plain = _grads(PolicyModel(tiny_model("llama")), "llama")
    with activation_offload(min_bytes=0):
        offloaded = _grads(PolicyModel(tiny_model("llama")), "llama")
    for name, want in plain.items():
        assert torch.equal(offloaded[name], want)
