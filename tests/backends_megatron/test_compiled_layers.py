"""Compiled layers on Megatron: the numbers of Megatron's own layers, one program for micro-batches of any lengths, and
only where one device computes a dense layer alone.

A backend of dynamo stands in for the compiler, which needs one of C++ on a CPU: it runs what was traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from dovetail.backends.base import ForwardOptions
from dovetail.config.megatron import MegatronConfig
from dovetail.config.optim import OptimConfig
from dovetail.models.load import load_config
from dovetail.protocol import DataProto
from tests.backends_megatron.family_models import VOCAB_SIZE, forget_layout, megatron_config, save_folder
from tests.backends_megatron.test_backend import nll
from tests.ranks import run_alone
from tests.workers.tiny_run import rollout_batch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

Numbers = tuple[Tensor, dict[str, Tensor]]
"""Log-probs, and gradients by name."""
MODELS = ("qwen2", "qwen3", "llama3", "qwen3_yarn")
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "deepseek_v3": {},
    "qwen2": {"override": {"recompute_granularity": "selective"}},
    "llama": {"more": {"override_mcore_model_config": {"rotary_percent": 1.0}}},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_alone(run_cases, tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_layers_that_compile_have_the_numbers_of_megatrons_own(
    name: str, recompute: bool, found: dict[str, Any]
) -> None:
    log_probs, gradients = found[f"{name}, {recompute}"]
    own_log_probs, own_gradients = found[f"{name}, Megatron's"]
    torch.testing.assert_close(log_probs, own_log_probs, atol=1e-6, rtol=0)
    assert gradients.keys() == own_gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, own_gradients[key], atol=1e-6, rtol=0, msg=key)


@pytest.mark.parametrize("recompute", [False, True])
def test_traced_layers_are_the_same_to_the_bit(recompute: bool, found: dict[str, Any]) -> None:
    log_probs, gradients = found[f"traced, {recompute}"]
    plain_log_probs, plain_gradients = found[f"qwen2, {recompute}"]
    assert torch.equal(log_probs, plain_log_probs)
    assert all(torch.equal(gradient, plain_gradients[key]) for key, gradient in gradients.items())


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_are_compiled_once_whatever_the_number_of_sequences(recompute: bool, found: dict[str, Any]) -> None:
    first, *others = found[f"programs, {recompute}"]
    assert first > 0
    assert others == [first] * len(others)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_and_overrides_keep_megatrons_layers(name: str, found: dict[str, Any]) -> None:
    assert "DenseLayer" not in found[f"layers of {name}"]


def test_layers_shared_by_devices_and_transformer_engines_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.backends.megatron import dense_layer

    def compiles(**sizes: int) -> bool:
        dense = SimpleNamespace(num_moe_experts=None, multi_latent_attention=False)
        return dense_layer.layers_compile(megatron_config(**sizes), dense)

    assert compiles()
    assert not any((compiles(tp=2), compiles(pp=2), compiles(cp=2)))
    monkeypatch.setattr(dense_layer, "has_transformer_engine", lambda: True)
    assert not compiles()


def run_cases(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in MODELS:
        save_folder(name, folder / name)
        found[f"{name}, Megatron's"] = numbers(build(folder / name, compiles=False))
        # Dynamo looks functions of `torch.cuda` up by name: not while they have stand-ins.
        torch._dynamo.trace_rules.get_torch_obj_rule_map()
        for recompute in (False, True):
            backend = build(folder / name, recompute=recompute)
            assert class_names(backend) == {"DenseLayer"}
            found[f"{name}, {recompute}"] = numbers(backend)
    for recompute in (False, True):
        backend = build(folder / "qwen2", recompute=recompute)
        with traced(backend) as programs:
            found[f"traced, {recompute}"] = numbers(backend)
            counts = [programs.frame_count]
            for batch in (rows(1, 2, 3), rows(5), rows(1, 4), rows(8), rows(2, 2, 2, 2)):
                backend.forward(batch, ForwardOptions(last_tokens=8))
                backend.forward_backward(batch, nll)
                counts.append(programs.frame_count)
            found[f"programs, {recompute}"] = counts
    for name, options in OTHERS.items():
        save_folder(name, folder / f"other {name}")
        config = megatron_config(**options)
        found[f"layers of {name}"] = class_names(build(folder / f"other {name}", config=config))
    return found


def build(folder: Path, *, compiles: bool = True, recompute: bool = False, config: MegatronConfig | None = None) -> Any:
    from dovetail.backends.megatron.build import build_megatron_backend

    forget_layout()
    return build_megatron_backend(
        load_config(folder),
        "policy",
        weights=folder,
        megatron=config or megatron_config(),
        optim=OptimConfig(total_training_steps=2),
        recompute=recompute,
        compile_layers=compiles,
    )


@contextmanager
def traced(backend: Any) -> Iterator[CompileCounterWithBackend]:
    """Trace the layers, which elsewhere on a CPU run as they are written (`shim`)."""
    from dovetail.backends.megatron.shim import cuda_to_cpu

    programs = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    with cuda_to_cpu(), torch.compiler.set_stance("default"):
        for layer in backend.model.chunks[0].decoder.layers:
            layer.compile_regions(backend=programs)
        yield programs


def class_names(backend: Any) -> set[str]:
    return {type(layer).__name__ for layer in backend.model.chunks[0].decoder.layers}


def numbers(backend: Any) -> Numbers:
    batch = rows(3, 3, 2)
    log_probs = [output.log_probs for output in backend.forward(batch, ForwardOptions(last_tokens=8))]
    backend.forward_backward(batch, nll)
    return torch.cat(log_probs), {name: gradient.clone() for name, gradient in backend.named_gradients()}


def rows(*counts: int) -> list[DataProto]:
    """Micro-batches of so many rows, of 3 to 14 tokens each."""
    batch = rollout_batch(8)
    batch.tensors["input_ids"] %= VOCAB_SIZE
    ends = torch.tensor(counts).cumsum(0).tolist()
    return [batch[end - count : end] for count, end in zip(counts, ends, strict=True)]
