"""The embedded engine on CUDA: Triton kernels and graphs against plain transformers on the same device."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.models.exact import use_exact_modules
from dovetail.models.policy import PolicyModel
from dovetail.rollout import GenerationRequest, GenerationResult, SamplingParams
from dovetail.rollout.native.cuda.decoder import FusedDecoder
from dovetail.rollout.native.cuda.kernels.ops import triton_ops
from dovetail.rollout.native.engine import NativeEngine
from tests.models.tiny import run_model, tiny_model
from tests.rollout.test_native_engine import FAMILIES, prompts, requests, tokens

pytestmark = pytest.mark.gpu

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


def version_gaps(
    results: list[GenerationResult], rows: list[list[int]], models: dict[int, Any]
) -> dict[int, torch.Tensor]:
    """By version: distances between log-probs and those of a plain forward of the weights that wrote the tokens."""
    gaps: dict[int, list[torch.Tensor]] = {version: [] for version in models}
    for r in results:
        assert r.weight_versions == sorted(r.weight_versions)
        for version, model in models.items():
            exact = plain_log_probs(model, rows[int(r.request_id[1:])], r, 1.0)
            gaps[version].append((torch.tensor(r.log_probs) - exact)[torch.tensor(r.weight_versions) == version].abs())
    return {version: torch.cat(parts) for version, parts in gaps.items()}


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_5_vl"])
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


def test_graphs_and_eager_steps_give_the_sampling_masks_of_the_slot_batch() -> None:
    model = cuda_model("qwen2", vocab_size=1 << 15)
    sampling = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, max_new_tokens=20, logprobs="processed")
    asked = [
        replace(request, sampling=replace(request.sampling, keep_mask=number % 3 > 0))
        for number, request in enumerate(requests(prompts(30, seed=4), sampling))
    ]
    expected = NativeEngine(copy.deepcopy(model).cpu()).generate(asked)
    for eager in (False, True):
        found = NativeEngine(model, max_num_seqs=30, enforce_eager=eager, max_mask_width=50).generate(asked)
        assert tokens(found) == tokens(expected)
        for a, b in zip(found, expected, strict=True):
            assert a.log_probs == pytest.approx(b.log_probs, abs=1e-4)
            assert (a.sampling_mask is None) == (b.sampling_mask is None)
            if a.sampling_mask is not None and b.sampling_mask is not None:
                assert sorted(a.sampling_mask.T.tolist()) == sorted(b.sampling_mask.T.tolist())


def test_graphs_of_many_rows_share_the_memory_of_the_largest() -> None:
    """Which is that of 1,024 rows' logits; graphs with logits of all rows, or captured in growing order, take more."""
    model = cuda_model("qwen2", torch.bfloat16, vocab_size=1 << 17)
    rows = prompts(1600, seed=14)
    asked = requests(rows, SamplingParams(max_new_tokens=6, ignore_eos=True))
    found = []
    for eager in (True, False):
        engine = NativeEngine(model, max_num_seqs=1600, enforce_eager=eager)
        engine.generate(asked)  # the pages of all, whose growth would end the graphs
        steps = engine._batch._steps
        steps.forget()
        found.append([engine.generate(asked[:count]) for count in (100, 300, 700, 1100, 1600)])
    assert found[0] == found[1]
    assert len(steps._graphs) == 5
    segments = [part for part in torch.cuda.memory_snapshot() if part["segment_pool_id"] == steps._memory]
    assert 0 < sum(part["total_size"] for part in segments) < 1.5 * (1024 * 2 << 17)


@pytest.mark.parametrize(("family", "fields"), [("qwen2", {}), ("mistral_window", {"sliding_window": 100})])
def test_graphs_and_overlap_change_nothing_for_small_batches(
    family: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which program ends last is chance; what it adds up is not."""
    model = cuda_model(family, torch.bfloat16, intermediate_size=256, num_hidden_layers=6, **fields)
    rows = prompts(40, seed=5, longest=300)
    sampling = SamplingParams(max_new_tokens=100, ignore_eos=True)
    found = [
        NativeEngine(model, max_num_seqs=40, enforce_eager=eager).generate(requests(rows, sampling))
        for eager in (False, False, True)
    ]
    # Here: without Triton this module can still be collected.
    from dovetail.rollout.native.cuda.kernels import attention, small_batch

    for kernels in (attention, small_batch):
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


def test_raw_log_probs_are_those_at_temperature_1() -> None:
    asked = requests(prompts(3), SamplingParams(temperature=0.6, top_p=0.9, max_new_tokens=8, logprobs="raw"))
    on_cuda, on_cpu = (NativeEngine(model).generate(asked) for model in (cuda_model("llama"), tiny_model("llama")))
    assert tokens(on_cuda) == tokens(on_cpu)
    for a, b in zip(on_cuda, on_cpu, strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "is_few"), [("llama", False), ("llama", True), ("mistral_window", False), ("mistral_window", True)]
)
def test_bfloat16_log_probs_are_as_near_to_float32_as_those_of_a_plain_forward(family: str, is_few: bool) -> None:
    """bfloat16 rounds both; what must not happen is that the engine adds to it."""
    model = cuda_model(family, torch.bfloat16, intermediate_size=256 if is_few else 160)
    assert (FusedDecoder(model, triton_ops())._small_batch is not None) == is_few
    rows = prompts(16, seed=4, longest=100)
    results = NativeEngine(model).generate(requests(rows, SamplingParams(max_new_tokens=64, ignore_eos=True)))
    plain = torch.cat([plain_log_probs(model, row, r, 1.0) for row, r in zip(rows, results, strict=True)])
    exact_model = model.float()
    exact = torch.cat([plain_log_probs(exact_model, row, r, 1.0) for row, r in zip(rows, results, strict=True)])
    engine = torch.cat([torch.tensor(r.log_probs) for r in results])
    assert (engine - exact).abs().mean() <= 1.15 * (plain - exact).abs().mean()


@pytest.mark.parametrize("window", [64, 100, 200])
def test_windows_of_several_pages_have_the_log_probs_of_a_plain_forward(window: int) -> None:
    """Pages hold 64 tokens; rows longer than the window and shorter ones, few rows with split keys and many."""
    model = cuda_model("qwen2_window", sliding_window=window)
    rows = [*prompts(3, seed=7, shortest=300, longest=400), *prompts(30, seed=8, longest=250)]
    sampling = SamplingParams(max_new_tokens=80, ignore_eos=True)
    engine = NativeEngine(model, max_num_seqs=33, max_prefill_tokens=500)
    for part in (rows[:2], rows):
        results = engine.generate(requests(part, sampling))
        gaps = [
            (torch.tensor(r.log_probs) - plain_log_probs(model, row, r, 1.0)).abs()
            for row, r in zip(part, results, strict=True)
        ]
        assert torch.cat(gaps).mean() <= 1e-5


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


@pytest.mark.parametrize("eager", [False, True])
def test_a_second_turn_prefills_what_is_new_with_the_log_probs_of_a_plain_forward(eager: bool) -> None:
    """Turn two begins with the prompt and the response of turn one, whose pages the engine still has."""
    model = cuda_model("qwen2")
    sampling = SamplingParams(max_new_tokens=70, ignore_eos=True, n=2)
    first = prompts(6, seed=9, shortest=60, longest=120)
    engines = [NativeEngine(model, enforce_eager=eager, enable_prefix_caching=cached) for cached in (True, False)]
    counts = []
    for engine in engines:
        one = engine.generate(requests(first, sampling))
        second = [[*first[i // 2], *r.token_ids, 5, 6, 7] for i, r in enumerate(one)]
        before = engine.stats.prefill_tokens
        two = engine.generate(requests(second, replace(sampling, n=1)))
        counts.append(engine.stats.prefill_tokens - before)
        gaps = [
            (torch.tensor(r.log_probs) - plain_log_probs(model, row, r, 1.0)).abs()
            for row, r in zip(second, two, strict=True)
        ]
        assert torch.cat(gaps).mean() <= 1e-5
    # All but the last token is prefilled; of it, with the cache, what no full page of turn one holds.
    assert counts[1] == sum(len(row) - 1 for row in second)
    assert counts[0] == sum(len(row) - 1 - (len(row) - 4) // 64 * 64 for row in second)


def test_groups_that_start_together_prefill_a_common_prefix_once() -> None:
    model = cuda_model("llama", torch.bfloat16)
    system, *rest = prompts(9, seed=10, shortest=128, longest=128)
    rows = [[*system, *row[:50]] for row in rest]
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True, n=4)
    engines = [NativeEngine(model, enable_prefix_caching=cached) for cached in (True, False)]
    results = [engine.generate(requests(rows, sampling)) for engine in engines]
    assert engines[0].stats.prefill_tokens == 128 + 8 * 49
    assert engines[1].stats.prefill_tokens == 8 * 177
    gaps = [
        torch.cat([torch.tensor(r.log_probs) - plain_log_probs(model, rows[i // 4], r, 1.0) for i, r in enumerate(rs)])
        for rs in results
    ]
    assert gaps[0].abs().mean() <= 1.15 * gaps[1].abs().mean(), "shared pages are as exact as own ones"


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_requests_outlive_updates_between_two_tokens(kv_on_update: Any) -> None:
    """Each token has the log-prob of its version's weights; `keep` is faster and does not have it."""
    model = cuda_model("qwen3")
    models = {0: copy.deepcopy(model)}
    engine = NativeEngine(model, max_num_seqs=12, max_prefill_tokens=256, kv_on_update=kv_on_update)
    rows = prompts(8, seed=11, shortest=40, longest=150)
    with engine.open_stream() as stream:
        stream.submit(*requests(rows, SamplingParams(n=2, max_new_tokens=60, ignore_eos=True)))
        for version in (1, 2):
            target = engine.stats.decode_tokens + 200
            engine.wait(lambda target=target: engine.stats.decode_tokens >= target)
            for parameter in model.parameters():
                # Moved in memory too: graphs of the old addresses must go, also while rows keep decoding.
                parameter.data = parameter.data * 1.1
            models[version] = copy.deepcopy(model)
            engine.update_weights(None, version)
        results = stream.drain()
    gaps = version_gaps(results, rows, models)
    assert gaps[0].mean() <= 1e-5
    later = torch.cat([gaps[1], gaps[2]])
    assert later.mean() <= 1e-5 if kv_on_update == "recompute" else later.mean() > 1e-3


def test_requests_sleep_while_the_trainer_works_and_go_on_with_exact_log_probs() -> None:
    """Partial rollouts on the trainer's device: the KV cache is given back between two steps of the trainer."""
    model = cuda_model("llama")
    models = {0: copy.deepcopy(model)}
    engine = NativeEngine(model, max_num_seqs=10, max_prefill_tokens=256)
    rows = prompts(8, seed=12, longest=150)
    with engine.open_stream() as stream:
        stream.submit(*requests(rows, SamplingParams(n=2, max_new_tokens=80, ignore_eos=True)))
        for version in (1, 2, 3):
            target = engine.stats.decode_tokens + 200
            engine.wait(lambda target=target: engine.stats.decode_tokens >= target)
            engine.pause()
            before = torch.cuda.memory_allocated()
            held = engine.health().kv_cache_bytes
            engine.sleep(["kv_cache"])
            assert engine.health().kv_cache_bytes == 0
            assert before - torch.cuda.memory_allocated() >= held > 0
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            models[version] = copy.deepcopy(model)
            engine.wake(["kv_cache"])
            engine.update_weights(None, version)
            engine.continue_()
        results = stream.drain()
    assert all(len(r.token_ids) == 80 for r in results)
    gaps = version_gaps(results, rows, models)
    assert all(gap.numel() and gap.mean() <= 1e-5 for gap in gaps.values())


def test_pages_are_added_for_requests_that_come_while_others_run() -> None:
    model = cuda_model("llama")
    engine = NativeEngine(model, max_num_seqs=40)
    rows = prompts(40, seed=13, longest=150)
    sampling = SamplingParams(max_new_tokens=100, ignore_eos=True)
    with engine.open_stream() as stream:
        stream.submit(*requests(rows[:1], sampling))
        engine.wait(lambda: engine.stats.decode_tokens >= 8)
        held = engine.health().kv_cache_bytes
        stream.submit(*requests(rows[1:], sampling, first=1))
        engine.wait(lambda: engine.health().num_running == 40)
        assert engine.health().kv_cache_bytes > held
        results = {int(r.request_id[1:]): r for r in stream.drain()}
    assert engine.stats.prefill_tokens == sum(len(row) - 1 for row in rows), "what ran was not computed again"
    assert (version_gaps(list(results.values()), rows, {0: model})[0]).mean() <= 1e-5


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama_tied", "qwen2", "qwen3", "mistral_window"])
def test_exact_log_probs_are_those_of_an_exact_trainer_to_the_bit(family: str, dtype: torch.dtype) -> None:
    model = cuda_model(family, dtype, hidden_size=256, intermediate_size=640)
    use_exact_modules(model)
    rows = prompts(70, seed=3, longest=300)
    sampling = SamplingParams(temperature=0.8, max_new_tokens=100, ignore_eos=True, n=2)
    together = NativeEngine(model, exact=True, max_num_seqs=90, max_prefill_tokens=1000).generate(
        requests(rows, sampling)
    )
    few = NativeEngine(model, exact=True, max_num_seqs=7, enforce_eager=True).generate(requests(rows, sampling))
    assert together == few
    policy = PolicyModel(model)
    for size in (3, 140):  # of a micro-batch
        for start in range(0, len(together), size):
            part = together[start : start + size]
            sequences = [[*rows[(start + i) // 2], *result.token_ids] for i, result in enumerate(part)]
            longest = max(map(len, sequences))
            ids, mask = (torch.zeros(len(part), longest, dtype=torch.long) for _ in range(2))
            for row, sequence in enumerate(sequences):
                ids[row, : len(sequence)], mask[row, : len(sequence)] = torch.tensor(sequence), 1
            with torch.no_grad():
                log_probs = run_model(policy, ids, mask, temperature=0.8).log_probs.cpu()
            for row, (sequence, result) in enumerate(zip(sequences, part, strict=True)):
                found = log_probs[row, len(sequence) - 100 : len(sequence)]
                assert torch.equal(torch.tensor(result.log_probs), found)
