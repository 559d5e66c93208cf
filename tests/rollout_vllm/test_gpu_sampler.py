"""The sampler for vLLM's second model runner: when it steps in. What it computes is seen on a GPU (test_gpu.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.rollout.vllm.environment import prepare

pytestmark = pytest.mark.engine

VOCABULARY = 16


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The logits that vLLM's own `sample` was given, call by call."""
    prepare(cpu=True)
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    found: list[Any] = []

    def call(self: Any, logits: torch.Tensor, batch: Any) -> Any:
        return self.sample(logits, batch.expanded_idx_mapping, "whatever the version passes")

    def sample(self: Any, logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found.append(logits)
        return logits.argmax(-1), logits

    monkeypatch.setattr(Sampler, "__call__", call)
    monkeypatch.setattr(Sampler, "sample", sample)
    return found


def sampler_of(*, temperature: float = 1.0, top_k: int = VOCABULARY, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    """Two requests; the second is sampled as it is. Without vLLM's own buffers, which live on a GPU."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from dovetail.rollout.vllm_worker.gpu_sampler import TemperatureLogprobsGpuSampler

    def column(first: float, second: float) -> Any:
        return SimpleNamespace(np=np.array([first, second]))

    def apply_temperature(logits: torch.Tensor, mapping: torch.Tensor, rows: np.ndarray) -> None:
        logits /= torch.tensor(states.temperature.np)[mapping].unsqueeze(1).float()

    states = SimpleNamespace(
        vocab_size=VOCABULARY,
        temperature=column(temperature, 1.0),
        top_k=column(top_k, VOCABULARY),
        top_p=column(top_p, 1.0),
        min_p=column(min_p, 0.0),
        apply_temperature=apply_temperature,
    )
    sampler = Sampler.__new__(Sampler)
    sampler.sampling_states = states  # pyrefly: ignore[bad-assignment]
    TemperatureLogprobsGpuSampler.take_over(sampler)
    return sampler


def batch_of(*rows: int) -> Any:
    return SimpleNamespace(idx_mapping_np=np.array(rows), expanded_idx_mapping=torch.tensor(rows))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_sampled_as_it_is_goes_straight_to_vllm(calls: list[Any], temperature: float) -> None:
    logits = torch.randn(2, VOCABULARY).bfloat16()
    _, scores = sampler_of(temperature=temperature)(logits, batch_of(0, 1))
    assert calls[0] is logits
    assert scores is logits


def test_vllm_divides_by_the_temperature_in_float32(calls: list[Any]) -> None:
    logits = torch.randn(2, VOCABULARY).bfloat16()
    sampler_of(temperature=0.6)(logits, batch_of(0, 1))
    assert calls[0].dtype == torch.float32
    assert torch.equal(calls[0], logits.float())


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_scores_are_those_before_a_cut(calls: list[Any], cut: dict[str, Any]) -> None:
    logits = torch.randn(2, VOCABULARY).bfloat16()
    given = logits.clone()
    _, scores = sampler_of(temperature=0.6, **cut)(given, batch_of(0, 1))
    assert torch.equal(scores, logits.float() / torch.tensor([[0.6], [1.0]]))
    assert torch.equal(given, logits)


def test_a_request_that_is_not_in_the_batch_changes_nothing(calls: list[Any]) -> None:
    logits = torch.randn(1, VOCABULARY).bfloat16()
    sampler_of(temperature=0.6, top_p=0.9)(logits, batch_of(1))
    assert calls[0] is logits
