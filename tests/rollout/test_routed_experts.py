"""The embedded engine returns the experts that it sent each token to, over slots and over pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.models.policy import PolicyModel
from dovetail.models.router_replay import RouterReplay
from dovetail.protocol.routed_experts import by_row
from dovetail.rollout import GenerationRequest, GenerationResult, SamplingParams
from dovetail.rollout.native.cuda.batch import PagedBatch
from dovetail.rollout.native.engine import NativeEngine
from tests.models.tiny import run_model, tiny_model
from tests.rollout import plain_ops

SAMPLING = SamplingParams(n=3, max_new_tokens=12, seed=5, stop_token_ids=tuple(range(3, 20)), keep_experts=True)
PROMPTS = [[5, 40, 77, 21, 9, 100, 33, 12, 64, 7, 18], [5, 40, 77, 21, 9, 100, 33, 12, 99], [200, 3]]


def requests(**changes: Any) -> list[GenerationRequest]:
    sampling = replace(SAMPLING, **changes)
    return [GenerationRequest(f"r{number}", prompt, sampling) for number, prompt in enumerate(PROMPTS)]


def engine(kind: str, family: str = "qwen3_moe", *, max_num_seqs: int = 4, **fields: Any) -> NativeEngine:
    model = tiny_model(family, num_hidden_layers=3, **fields)
    if kind == "slots":
        return NativeEngine(model, max_num_seqs=max_num_seqs, max_prefill_tokens=8, keep_experts=True)
    made = NativeEngine(model, max_num_seqs=max_num_seqs, keep_experts=True, ops=plain_ops)
    sizes = max_num_seqs, 8, made._max_model_len
    made._batch = PagedBatch(
        made._model, torch.device("cpu"), *sizes,
        page_size=4, ops=plain_ops, routing=made._routing, fuse=kind == "pages",
    )  # fmt: skip
    return made


def trainers_experts(model: Any, result: GenerationResult) -> np.ndarray:
    """What a forward over prompt and response chooses."""
    ids = torch.tensor([[*PROMPTS[int(result.request_id[1:])], *result.token_ids]])
    policy = PolicyModel(model, router_replay=RouterReplay(model))
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        return by_row(run_model(policy, **rows, record_experts=True).routed_experts, rows["attention_mask"])[0]


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["slots", "pages", "plain_pages"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_experts_of_every_token_are_those_of_a_forward_over_the_whole_row(kind: str, family: str) -> None:
    """Prompts that are longer than a prefill and that share a beginning; responses of many lengths; more than slots."""
    results = engine(kind, family).generate(requests())
    model = tiny_model(family, num_hidden_layers=3)
    lengths = {len(result.token_ids) for result in results}
    assert len(lengths) > 2
    for result in results:
        expected = trainers_experts(model, result)
        assert result.routed_experts is not None
        assert result.routed_experts.dtype == np.uint8
        assert np.array_equal(np.sort(result.routed_experts), np.sort(expected[:-1]))


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_experts_come_only_when_asked_for_and_of_an_engine_that_keeps_them(kind: str) -> None:
    keeps = engine(kind)
    assert all(result.routed_experts is None for result in keeps.generate(requests(keep_experts=False)))
    assert all(result.routed_experts is not None for result in keeps.generate(requests()))
    with pytest.raises(ValueError, match="build this engine with keep_experts=True"):
        NativeEngine(tiny_model("qwen3_moe")).generate(requests())


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_many_experts_take_two_bytes(kind: str) -> None:
    fields = {"num_experts": 300, "moe_intermediate_size": 8}
    results = engine(kind, **fields).generate(requests(n=1))
    model = tiny_model("qwen3_moe", num_hidden_layers=3, **fields)
    for result in results:
        assert result.routed_experts is not None
        assert result.routed_experts.dtype == np.int16
        assert np.array_equal(np.sort(result.routed_experts), np.sort(trainers_experts(model, result)[:-1]))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_on_cuda_the_experts_are_those_of_a_forward(family: str) -> None:
    """In float32, in which no two experts are so near that another kernel chooses the other."""
    model = tiny_model(family, num_hidden_layers=3).cuda()
    results = NativeEngine(model, max_num_seqs=4, max_prefill_tokens=8, keep_experts=True).generate(requests())
    on_cpu = tiny_model(family, num_hidden_layers=3)
    for result in results:
        assert result.routed_experts is not None
        assert np.array_equal(np.sort(result.routed_experts), np.sort(trainers_experts(on_cpu, result)[:-1]))


@pytest.mark.gpu
def test_captured_steps_keep_the_experts_of_steps_that_are_not() -> None:
    results = []
    for eager in (False, True):
        model = tiny_model("qwen3_moe", num_hidden_layers=3).to("cuda", torch.bfloat16)
        engine = NativeEngine(model, max_num_seqs=4, enforce_eager=eager, keep_experts=True)
        results.append(engine.generate(requests()))
    for captured, plain in zip(*results, strict=True):
        assert captured.token_ids == plain.token_ids
        assert captured.routed_experts is not None
        assert plain.routed_experts is not None
        assert np.array_equal(captured.routed_experts, plain.routed_experts)
