"""Muon: torch's own numbers in one process, the same update on two ranks, the same run after a resume; else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.backends import optimizer
from dovetail.backends.build import build_backend
from dovetail.backends.optimizer import Muon, muon_names
from dovetail.backends.torch_backend import TorchBackend
from dovetail.config.optim import OptimConfig
from dovetail.models.value import ValueModel
from tests.backends.tiny import (
    FP32,
    as_numpy,
    largest_difference,
    tiny_policy,
    train_steps,
)
from tests.ranks import run_alone, run_ranks

pytestmark = pytest.mark.distributed

OPTIM = OptimConfig(optimizer="Muon", lr=1e-2, eps=1e-4, weight_decay=0.1)
STEPS = 3
# Five steps of the orthogonalisation multiply what is nearly zero by 3.44^5 = 485, rounding too. From bfloat16's 2^-9
# that is a whole step: two orders of summation need not agree. From float32's 2^-24 it is 3e-5 of one.
TOLERANCE = 10 * 485 * 2**-24 * OPTIM.lr


def make(strategy: str, **changes: Any) -> TorchBackend:
    return build_backend(strategy, tiny_policy(), fsdp=FP32, optim=OPTIM.model_copy(update=changes))


def weights(backend: TorchBackend) -> dict[str, np.ndarray]:
    return as_numpy(backend.named_weights())


def on_one(rank: int, world_size: int) -> dict[str, np.ndarray]:
    optimizer._DTYPE = torch.float32
    backend = make("single")
    train_steps(backend, STEPS)
    return weights(backend)


def on_ranks(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    backend = make("fsdp2")
    train_steps(backend, 2)
    backend.save_state(folder / "state")
    train_steps(backend, STEPS - 2)
    resumed = make("fsdp2")
    resumed.load_state(folder / "state")
    train_steps(resumed, STEPS - 2)
    found: dict[str, Any] = {"straight": weights(backend), "resumed": weights(resumed)}
    optimizer._DTYPE = torch.float32
    in_float32 = make("fsdp2")
    train_steps(in_float32, STEPS)
    found["in float32"] = weights(in_float32)
    with pytest.raises(ValueError, match=r"needs whole matrices, and the sharding has flattened .*use strategy=fsdp2"):
        make("fsdp")
    return found


def test_two_ranks_take_the_step_of_one_and_a_resumed_run_the_same(tmp_path: Path) -> None:
    alone = run_alone(on_one)
    start = as_numpy(make("single").named_weights())
    assert largest_difference(alone, start) > OPTIM.lr
    for found in run_ranks(on_ranks, 2, tmp_path):
        assert largest_difference(found["in float32"], alone) < TOLERANCE
        assert largest_difference(found["resumed"], found["straight"]) == 0


@pytest.mark.unit
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_matrix_is_stepped_as_torch_steps_it(adjust: str, nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((6, 4), (3, 8))]
    theirs = [matrix.detach().clone().requires_grad_() for matrix in ours]
    groups = [{"params": ours, "use_muon": True, "weight_decay": 0.1}]
    settings: dict[str, Any] = {"momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust}
    mine = Muon(groups, lr=0.02, betas=(0.9, 0.99), eps=1e-8, **settings)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, **settings)
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        mine.step()
        reference.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-7, rtol=0)


@pytest.mark.unit
def test_the_rest_is_stepped_by_adamw() -> None:
    scale = torch.ones(3, requires_grad=True)
    same = torch.ones(3, requires_grad=True)
    groups = [{"params": [scale], "use_muon": False, "weight_decay": 0.0}]
    mine = Muon(groups, lr=0.1, betas=(0.9, 0.99), eps=1e-8)
    reference = torch.optim.AdamW([same], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    for _ in range(3):
        scale.grad, same.grad = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1.0, -2.0, 0.5])
        mine.step()
        reference.step()
    assert torch.equal(scale, same)


@pytest.mark.unit
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_and_heads_are_no_matrices_of_the_layers(tied: bool) -> None:
    names = muon_names(tiny_policy(tied=tied))
    assert names
    assert all("proj" in name for name in names)
    value = ValueModel(_classifier())
    assert all("proj" in name for name in muon_names(value))


def _classifier() -> Any:
    from transformers import LlamaConfig, LlamaForTokenClassification

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=11, num_labels=1,
    )  # fmt: skip
    return LlamaForTokenClassification(config)
