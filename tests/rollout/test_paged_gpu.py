"""The embedded engine on CUDA: Triton kernels and graphs against plain transformers on the same device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.rollout import GenerationRequest, GenerationResult, SamplingParams
from dovetail.rollout.native.cuda.decoder import FusedDecoder
from dovetail.rollout.native.cuda.kernels.ops import triton_ops
from dovetail.rollout.native.engine import NativeEngine
from tests.models.tiny import tiny_model
from tests.rollout.test_native_engine import prompts, requests, tokens

pytestmark = pytest.mark.gpu

FAMILIES = ("llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe", "mixtral")
GREEDY = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)


def cuda_model(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    return tiny_model(family, **overrides).to("cuda", dtype)


@torch.no_grad()
def plain_log_probs(model: Any, prompt: list[int], result: GenerationResult, temperature: float) -> torch.Tensor:
    ids = torch.tensor([prompt + result.token_ids], device="cuda")
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()


def greedy_of(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt], device="cuda")
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=[], pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_and_log_probs_are_those_of_transformers(family: str) -> None:
    model = cuda_model(family)
    rows = prompts(8, longest=150)
    engine = NativeEngine(model, max_num_seqs=6, max_prefill_tokens=100)
    assert tokens(engine.generate(requests(rows, GREEDY))) == [greedy_of(model, row, 20) for row in rows]
    sampling = SamplingParams(temperature=0.8, max_new_tokens=40, ignore_eos=True, n=2)
    for asked in (sampling, replace(sampling, top_p=0.9, top_k=50)):
        results = engine.generate(requests(rows, asked))
        gaps = [
            (torch.tensor(r.log_probs) - plain_log_probs(model, rows[i // 2], r, 0.8)).abs()
            for i, r in enumerate(results)
        ]
        assert torch.cat(gaps).mean() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_change_nothing_and_samples_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    model = cuda_model("qwen3", dtype, head_dim=64, num_attention_heads=8)
    rows = prompts(70, seed=2, longest=100)
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    together = NativeEngine(model, max_num_seqs=70).generate(requests(rows, sampling))
    eager = NativeEngine(model, max_num_seqs=70, enforce_eager=True).generate(requests(rows, sampling))
    assert together == eager
    few = NativeEngine(model, max_num_seqs=5).generate(requests(rows, sampling))
    same = sum(a == b for a, b in zip(tokens(together), tokens(few), strict=True))
    assert same == 70 if dtype == torch.float32 else same >= 60


def test_graphs_and_overlap_change_nothing_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which program ends last is chance; what it adds up is not."""
    model = cuda_model("qwen2", torch.bfloat16, intermediate_size=256, num_hidden_layers=6)
    rows = prompts(40, seed=5, longest=300)
    sampling = SamplingParams(max_new_tokens=100, ignore_eos=True)
    found = [
        NativeEngine(model, max_num_seqs=40, enforce_eager=eager).generate(requests(rows, sampling))
        for eager in (False, False, True)
    ]
    # Here: without Triton this module can still be collected.
    from dovetail.rollout.native.cuda.kernels import attention, few_rows

    for kernels in (attention, few_rows):
        assert kernels.overlaps(model.device) == (torch.cuda.get_device_capability()[0] >= 9)
        monkeypatch.setattr(kernels, "overlaps", lambda _: False)
    found.append(NativeEngine(model, max_num_seqs=40).generate(requests(rows, sampling)))
    assert all(other == found[0] for other in found)


def test_float32_samples_are_those_of_the_cpu() -> None:
    rows = prompts(6, seed=3)
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True, n=2)
    on_cuda = NativeEngine(cuda_model("llama")).generate(requests(rows, sampling))
    on_cpu = NativeEngine(tiny_model("llama")).generate(requests(rows, sampling))
    assert tokens(on_cuda) == tokens(on_cpu)


@pytest.mark.parametrize("is_few", [False, True])
def test_bfloat16_log_probs_are_as_near_to_float32_as_those_of_a_plain_forward(is_few: bool) -> None:
    """bfloat16 rounds both; what must not happen is that the engine adds to it."""
    model = cuda_model("llama", torch.bfloat16, intermediate_size=256 if is_few else 160)
    assert (FusedDecoder(model, triton_ops())._few_rows is not None) == is_few
    rows = prompts(16, seed=4, longest=100)
    results = NativeEngine(model).generate(requests(rows, SamplingParams(max_new_tokens=64, ignore_eos=True)))
    plain = torch.cat([plain_log_probs(model, row, r, 1.0) for row, r in zip(rows, results, strict=True)])
    exact_model = model.float()
    exact = torch.cat([plain_log_probs(exact_model, row, r, 1.0) for row, r in zip(rows, results, strict=True)])
    engine = torch.cat([torch.tensor(r.log_probs) for r in results])
    assert (engine - exact).abs().mean() <= 1.15 * (plain - exact).abs().mean()


def test_a_cache_of_fp8_takes_half_and_changes_log_probs_little() -> None:
    model = cuda_model("llama", torch.bfloat16)
    rows = prompts(16, seed=6, longest=100)
    sampling = SamplingParams(max_new_tokens=64, ignore_eos=True)
    sizes, gaps = [], []
    for dtype in ("auto", "fp8"):
        engine = NativeEngine(model, kv_cache_dtype=dtype)
        results = engine.generate(requests(rows, sampling))
        sizes.append(engine.health().kv_cache_bytes)
        plain = torch.cat([plain_log_probs(model, row, r, 1.0) for row, r in zip(rows, results, strict=True)])
        gaps.append(float((torch.cat([torch.tensor(r.log_probs) for r in results]) - plain).abs().mean()))
    assert sizes[0] == 2 * sizes[1]
    assert gaps[0] < gaps[1] < 0.08


def test_the_cache_is_given_back_in_sleep_and_weights_that_moved_are_found() -> None:
    model = cuda_model("llama")
    engine = NativeEngine(model)
    rows = prompts(4)
    before = tokens(engine.generate(requests(rows, GREEDY)))
    assert engine.health().kv_cache_bytes > 0
    engine.sleep(["kv_cache"])
    assert engine.health().kv_cache_bytes == 0
    for parameter in model.parameters():
        parameter.data = parameter.data.clone().mul_(1.01)
    engine.wake()
    engine.update_weights(None, 3)
    after = engine.generate(requests(rows, GREEDY))
    assert tokens(after) == [greedy_of(model, row, 20) for row in rows] != before
    assert {v for r in after for v in r.weight_versions} == {3}


def test_a_stop_token_ends_a_response_although_the_host_reads_late() -> None:
    model = cuda_model("qwen2")
    row = prompts(1, seed=8)[0]
    engine = NativeEngine(model)
    full = engine.generate([GenerationRequest("a", row, GREEDY)])[0]
    wanted = full.token_ids[5]
    stopped = engine.generate([GenerationRequest("a", row, replace(GREEDY, stop_token_ids=(wanted,)))])[0]
    assert stopped.token_ids == full.token_ids[: full.token_ids.index(wanted) + 1]
    assert stopped.finish_reason == "stop"


@pytest.mark.timeout(60)
def test_start_up_takes_seconds() -> None:
    model = cuda_model("llama", torch.bfloat16, num_hidden_layers=24)
    NativeEngine(model, max_num_seqs=256).generate(requests(prompts(256), SamplingParams(max_new_tokens=8)))
