"""The paged batch of the embedded engine, with plain PyTorch in place of its kernels.

It is held to what the slot batch is held to, and to what only pages can get wrong.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.protocol.sampling_mask import padded_sets
from dovetail.rollout import EngineError, GenerationRequest, SamplingParams
from dovetail.rollout.native.cuda import decoder
from dovetail.rollout.native.cuda.batch import PagedBatch
from dovetail.rollout.native.cuda.pages import FP8
from dovetail.rollout.native.engine import NativeEngine
from tests.models.tiny import tiny_model
from tests.rollout import plain_ops, test_native_control, test_native_engine
from tests.rollout.test_native_engine import FAMILIES, plain_log_probs, prompts, requests, tokens, transformers_greedy

pytestmark = pytest.mark.engine

GREEDY = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)

# Claims of the slot batch that do not count its steps. Greedy tokens and log-probs have tests of their own below.
SHARED_CLAIMS = [
    test_native_engine.test_samples_do_not_depend_on_the_number_of_engines,
    test_native_engine.test_a_shared_prompt_gives_the_tokens_of_separate_ones_and_is_prefilled_once,
    test_native_engine.test_a_response_continued_as_a_longer_prompt_goes_on_as_if_uninterrupted,
    test_native_engine.test_chunked_prefill_equals_whole_prefill,
    test_native_engine.test_stop_tokens_end_a_response_and_are_kept,
    test_native_engine.test_ragged_ends_leave_the_batch_and_results_keep_their_order,
    test_native_engine.test_generation_ends_at_the_longest_sequence_the_model_takes,
    test_native_engine.test_generation_leaves_the_process_random_state_alone,
    *(f for name, f in inspect.getmembers(test_native_control) if name.startswith("test_")),
]


def paged_engine(model: Any, *, page_size: int = 8, max_num_seqs: int = 4, **options: Any) -> NativeEngine:
    """An engine over small pages, so that sequences cross many of them."""
    width = options.get("mask_width", 0)
    engine = NativeEngine(model, max_num_seqs=max_num_seqs, max_mask_width=width, ops=plain_ops)
    sizes = max_num_seqs, 64, engine._max_model_len
    options = {"page_size": page_size, "ops": plain_ops, **options}
    engine._batch = PagedBatch(engine._model, torch.device("cpu"), *sizes, **options)
    return engine


def pages_held(engine: NativeEngine) -> int:
    batch = engine._batch
    assert isinstance(batch, PagedBatch)
    batch._scheduler.publish_left()
    return batch._pool.num_pages - batch._pool.num_free


def _cases() -> list[Any]:
    """Every claim with the first of each of its parameters: the rest say the same of other families."""
    cases = []
    for claim in SHARED_CLAIMS:
        marks = [m for m in getattr(claim, "pytestmark", []) if m.name == "parametrize"]
        fixed = {mark.args[0]: mark.args[1][0] for mark in marks}
        cases.append(pytest.param(claim, fixed, id=claim.__name__.removeprefix("test_")))
    return cases


@pytest.mark.parametrize(("claim", "fixed"), _cases())
def test_what_holds_for_slots_holds_for_pages(
    claim: Any, fixed: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = functools.partial(NativeEngine, ops=plain_ops)
    monkeypatch.setattr(test_native_engine, "NativeEngine", engine)
    monkeypatch.setattr(test_native_control, "NativeEngine", engine)
    names = set(inspect.signature(claim).parameters) - set(fixed)
    claim(**fixed, **{name: request.getfixturevalue(name) for name in names})


@pytest.mark.parametrize(
    ("family", "fuse"),
    [*((family, True) for family in (*FAMILIES, "qwen2_5_vl")), ("qwen2", False), ("qwen3_moe", False)],
)
def test_greedy_tokens_equal_transformers(family: str, fuse: bool) -> None:
    model = tiny_model(family)
    rows = prompts(6)
    engine = paged_engine(model, fuse=fuse)
    assert tokens(engine.generate(requests(rows, GREEDY))) == [transformers_greedy(model, row, 20) for row in rows]
    assert pages_held(engine) == 0


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.7), SamplingParams(top_p=0.8, top_k=30, min_p=0.01)])
def test_log_probs_equal_a_plain_forward_and_tokens_equal_the_slot_batchs(sampling: SamplingParams) -> None:
    model = tiny_model("qwen2")
    rows = prompts(5, seed=1)
    asked = requests(rows, replace(sampling, max_new_tokens=24, ignore_eos=True, n=2))
    results = paged_engine(model).generate(asked)
    assert tokens(results) == tokens(NativeEngine(model).generate(asked))
    gaps = [
        (torch.tensor(r.log_probs) - plain_log_probs(model, rows[i // 2], r.token_ids, sampling.temperature)).abs()
        for i, r in enumerate(results)
    ]
    assert torch.cat(gaps).mean() <= 1e-5


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_other_log_probs_are_those_of_the_slot_batch(mode: Any) -> None:
    model = tiny_model("llama")
    asked = requests(prompts(3), SamplingParams(temperature=0.6, top_p=0.9, max_new_tokens=8, logprobs=mode))
    for a, b in zip(paged_engine(model).generate(asked), NativeEngine(model).generate(asked), strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)


def test_samples_do_not_depend_on_the_batch() -> None:
    model = tiny_model("llama")
    rows = prompts(24, seed=2)
    sampling = SamplingParams(max_new_tokens=10)
    together = paged_engine(model, max_num_seqs=24).generate(requests(rows, sampling))
    alone = paged_engine(model, max_num_seqs=1)
    one_by_one = [r for i in range(24) for r in alone.generate(requests(rows[i : i + 1], sampling, first=i))]
    assert tokens(together) == tokens(one_by_one) == tokens(NativeEngine(model).generate(requests(rows, sampling)))


def test_logits_of_many_rows_are_drawn_from_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2")
    asked = requests(prompts(7, seed=3), SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs="raw", top_p=0.9))
    whole = paged_engine(model, max_num_seqs=7).generate(asked)
    monkeypatch.setattr(decoder, "_LOGIT_ROWS", 3)
    engine = paged_engine(model, max_num_seqs=7)
    rows: list[int] = []
    engine._model.get_output_embeddings().register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    parts = engine.generate(asked)
    assert set(rows) == {3, 1}
    assert tokens(parts) == tokens(whole)
    for part, one in zip(parts, whole, strict=True):
        assert part.log_probs == pytest.approx(one.log_probs, abs=1e-5)


def test_the_largest_graph_of_a_kind_is_captured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller ones use its memory; captured in a growing order, each would keep memory of its own."""
    engine = paged_engine(tiny_model("llama"), max_num_seqs=24)
    steps = engine._batch._steps
    captured: list[tuple[int, bool, bool]] = []

    class Graph:
        def __init__(self, *key: Any) -> None:
            self.key = key

        def replay(self) -> None:
            steps._step(*self.key)

    def capture(*key: Any) -> None:
        captured.append(key)
        steps._graphs[key] = Graph(*key)

    monkeypatch.setattr(steps, "_use_graphs", True)
    monkeypatch.setattr(steps, "_capture", capture)
    rows = prompts(6, seed=4)
    assert tokens(engine.generate(requests(rows[:2], GREEDY))) == [
        transformers_greedy(tiny_model("llama"), row, 20) for row in rows[:2]
    ]
    engine.generate(requests(rows, replace(GREEDY, temperature=1.0, top_p=0.5)))
    sizes = {filters: [size for size, other, _ in captured if other is filters] for filters in (False, True)}
    assert sizes[False] == [24, 2]
    assert sizes[True][:2] == [24, 8]


def test_rows_that_run_out_of_pages_go_back_in_line_and_lose_nothing() -> None:
    model = tiny_model("llama")
    rows = prompts(12, seed=3, shortest=20, longest=40)
    asked = requests(rows, replace(GREEDY, max_new_tokens=60))
    engine = paged_engine(model, max_num_seqs=8, max_pages=40)
    results = engine.generate(asked)
    found = tokens(results)
    assert found == [transformers_greedy(model, row, 60, guess) for row, guess in zip(rows, found, strict=True)]
    assert engine.stats.prefill_tokens > sum(len(row) - 1 for row in rows), "nobody was sent back: use fewer pages"
    assert pages_held(engine) == 0


def test_a_request_that_can_never_fit_is_refused_by_name() -> None:
    engine = paged_engine(tiny_model("llama"), max_pages=4)
    with pytest.raises(EngineError, match="'r0' of up to 60 tokens does not fit the KV cache of 4 pages x 8"):
        engine.generate(requests([[5] * 40], GREEDY))
    assert engine.health().num_waiting == 0
    assert tokens(engine.generate(requests([[5] * 4], GREEDY)))


def test_samples_of_a_prompt_hold_its_full_pages_together() -> None:
    engine = paged_engine(tiny_model("qwen3"), max_num_seqs=6)
    prompt = prompts(1, shortest=35, longest=35)[0]
    held = []
    batch = engine._batch
    step = batch.step

    def watched(version: int) -> bool:
        finished = step(version)
        held.append(pages_held(engine))
        return finished

    batch.step = watched  # pyrefly: ignore[bad-assignment]
    engine.generate([GenerationRequest("g", prompt, SamplingParams(n=6, seed=1, max_new_tokens=4, ignore_eos=True))])
    # 34 tokens: four full pages for all, and one or two pages (up to token 38) for each.
    assert max(held) <= 4 + 6 * 1 + 1
    assert engine.stats.prefill_tokens == 34
    assert pages_held(engine) == 0


@pytest.mark.parametrize("paged", [True, False])
def test_a_second_turn_prefills_only_what_is_new_and_keeps_its_log_probs(paged: bool) -> None:
    model = tiny_model("qwen2")
    engine = paged_engine(model) if paged else NativeEngine(model)
    (conversation,) = prompts(1, shortest=30, longest=30)
    sampling = SamplingParams(max_new_tokens=21, ignore_eos=True, seed=3)
    for turn in range(3):
        # All but the last token of the turn before, which nothing followed; of pages only full ones.
        known = len(conversation) - 4 if turn else 0
        cached = known // 8 * 8 if paged else known
        before = engine.stats.prefill_tokens
        (result,) = engine.generate([GenerationRequest(f"t{turn}", conversation, sampling, session="s")])
        assert engine.stats.prefill_tokens - before == len(conversation) - 1 - cached
        fresh = paged_engine(model, reuse_prefixes=False) if paged else NativeEngine(model, enable_prefix_caching=False)
        (alone,) = fresh.generate([GenerationRequest("a", conversation, sampling)])
        assert result.token_ids == alone.token_ids
        assert result.log_probs == pytest.approx(alone.log_probs, abs=1e-5)
        conversation = [*conversation, *result.token_ids, 5, 6, 7]
    # An update: nothing that the old weights computed is read.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.update_weights(None, 1)
    before = engine.stats.prefill_tokens
    (result,) = engine.generate([GenerationRequest("u", conversation, sampling, session="s")])
    assert engine.stats.prefill_tokens - before == len(conversation) - 1
    exact = plain_log_probs(model, conversation, result.token_ids)
    assert (torch.tensor(result.log_probs) - exact).abs().mean() <= 1e-5
    assert not paged or pages_held(engine) == 0


@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_groups_prefill_a_common_prefix_once_together_and_later(family: str) -> None:
    model = tiny_model(family)
    engine = paged_engine(model, max_num_seqs=8)
    system, *rest = prompts(7, seed=9, shortest=17, longest=17)
    rows = [[*system, *row] for row in rest]
    sampling = SamplingParams(n=2, max_new_tokens=10, ignore_eos=True)
    results = engine.generate(requests(rows[:4], sampling))
    assert engine.stats.prefill_tokens == 16 + 4 * (33 - 16)
    results += engine.generate(requests(rows[4:], sampling, first=4))
    assert engine.stats.prefill_tokens == 16 + 6 * (33 - 16)
    assert tokens(results) == tokens(NativeEngine(model).generate(requests(rows, sampling)))


def test_pages_are_added_for_requests_that_come_while_others_run() -> None:
    model = tiny_model("llama")
    engine = paged_engine(model, max_num_seqs=8)
    rows = prompts(8, seed=10, shortest=20)
    asked = requests(rows, replace(GREEDY, max_new_tokens=40))
    with engine.open_stream() as stream:
        stream.submit(asked[0])
        engine.wait(lambda: engine.stats.decode_tokens >= 4)
        prefilled = engine.stats.prefill_tokens
        stream.submit(*asked[1:])
        engine.wait(lambda: engine.health().num_running == 8)
        results = {result.request_id: result.token_ids for result in stream.drain()}
    assert engine.stats.prefill_tokens == prefilled + sum(len(row) - 1 for row in rows[1:]), "nothing was lost by it"
    for request, row in zip(asked, rows, strict=True):
        found = results[request.request_id]
        assert found == transformers_greedy(model, row, 40, found)


def test_prompts_that_come_one_by_one_while_many_rows_decode_go_together() -> None:
    model = tiny_model("llama")
    engine = paged_engine(model, max_num_seqs=64)
    rows = prompts(44, seed=11)
    asked = requests(rows, replace(GREEDY, max_new_tokens=60))
    with engine.open_stream() as stream:
        stream.submit(*asked[:32])
        engine.wait(lambda: engine.stats.decode_tokens > 0)
        prefills = engine.stats.prefill_steps
        waited = []
        for request in asked[32:]:  # as conversations come back from their tools
            stream.submit(request)
            engine._batch.step(0)
            waited.append(engine._batch.num_waiting)
        assert engine.stats.prefill_steps - prefills <= 7, "32 rows wait for two newcomers, 48 for three"
        assert max(waited) <= 2
        engine.wait(lambda: engine._batch.num_waiting == 0)
        stream.submit(*requests(rows[:1], GREEDY, first=44))
        num_steps = 0
        while engine._batch.num_waiting:
            engine._batch.step(0)
            num_steps += 1
        assert num_steps == 5, "one that is alone is passed over four times"
        results = {result.request_id: result.token_ids for result in stream.drain()}
    for request, row in zip(asked, rows, strict=True):
        found = results[request.request_id]
        assert found == transformers_greedy(model, row, 60, found)


def test_after_an_update_short_responses_decode_before_long_ones_are_recomputed() -> None:
    model = tiny_model("llama")
    engine = NativeEngine(model, ops=plain_ops, max_prefill_tokens=16)
    rows = [prompts(1, shortest=length, longest=length)[0] for length in (200, 10)]
    with engine.open_stream() as stream:
        stream.submit(*requests(rows, replace(GREEDY, max_new_tokens=30)))
        engine.wait(lambda: engine.stats.decode_tokens >= 8)
        engine.update_weights(None, 1)
        start = engine.stats.prefill_tokens
        (first,) = stream.results()
        assert engine.stats.prefill_tokens - start < 200, "the long one had to be computed first"
        (second,) = stream.drain()
    assert (len(first.token_ids), len(second.token_ids)) == (30, 30)
    assert [second.token_ids, first.token_ids] == [transformers_greedy(model, row, 30) for row in rows]


def test_many_stop_tokens_are_all_looked_at() -> None:
    model = tiny_model("llama")
    row = prompts(1, seed=8)[0]
    full = transformers_greedy(model, row, 20)
    unused = [token for token in range(3, 40) if token not in full]
    stopped = paged_engine(model).generate(
        requests([row], replace(GREEDY, stop_token_ids=(*unused[:20], full[5])), own_seeds=False)
    )[0]
    assert stopped.token_ids == full[: full.index(full[5]) + 1]
    assert stopped.finish_reason == "stop"


def test_weights_that_moved_in_memory_are_found_again() -> None:
    model = tiny_model("llama")
    engine = paged_engine(model)
    rows = prompts(2)
    before = tokens(engine.generate(requests(rows, GREEDY)))
    other = tiny_model("llama", seed=1)
    for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data = new.data
    engine.update_weights(None, 1)
    after = tokens(engine.generate(requests(rows, GREEDY)))
    assert after == [transformers_greedy(other, row, 20) for row in rows] != before


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_cache_of_fp8_takes_a_quarter_of_float32_and_changes_log_probs_little(family: str) -> None:
    model = tiny_model(family)
    rows = prompts(6, longest=40)
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True, n=2)
    exact, rounded = paged_engine(model), paged_engine(model, cache_dtype=FP8)
    results = rounded.generate(requests(rows, sampling))
    exact.generate(requests(rows, sampling))
    assert rounded.health().kv_cache_bytes * 4 == exact.health().kv_cache_bytes
    expected = [plain_log_probs(model, rows[i // 2], r.token_ids, 1.0) for i, r in enumerate(results)]
    gap = torch.cat([torch.tensor(r.log_probs) - e for r, e in zip(results, expected, strict=True)]).abs().mean()
    assert 1e-4 < gap < 0.05, "e4m3 keeps three bits behind the point: neither nothing nor much"
    again = rounded.generate(requests(rows, sampling))
    assert tokens(again) == tokens(results)


def test_fp8_is_refused_where_the_cache_has_no_pages() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype=fp8 is for CUDA; .*rollout\.kv_cache_dtype at auto"):
        NativeEngine(tiny_model("llama"), kv_cache_dtype="fp8")


def test_batches_that_need_a_few_more_pages_each_take_new_ones_once() -> None:
    """New pages cost new graphs on CUDA, so lengths that creep up must not make every batch capture its own."""
    engine = paged_engine(tiny_model("llama"))
    batch = engine._batch
    assert isinstance(batch, PagedBatch)
    sizes = []
    for length in range(40, 70, 5):
        sampling = SamplingParams(temperature=0, max_new_tokens=length, ignore_eos=True)
        engine.generate(requests(prompts(4), sampling))
        sizes.append(batch._pool.num_pages)
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 2  # enough for 40 tokens, and half as much again


def test_sampling_masks_are_those_of_the_slot_batch_also_beside_rows_without() -> None:
    model = tiny_model("qwen2")
    plain = SamplingParams(temperature=0.7, top_p=0.8, top_k=30, max_new_tokens=22, n=2, logprobs="processed")
    asked = [
        replace(request, sampling=replace(request.sampling, keep_mask=number % 3 > 0))
        for number, request in enumerate(requests(prompts(7, seed=5), plain))
    ]
    paged = paged_engine(model, mask_width=30).generate(asked)
    slots = NativeEngine(model).generate(asked)
    assert tokens(paged) == tokens(slots) == tokens(NativeEngine(model).generate(requests(prompts(7, seed=5), plain)))
    for a, b, request in zip(paged, slots, [request for request in asked for _ in range(2)], strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)
        assert (a.sampling_mask is not None) == (b.sampling_mask is not None) == request.sampling.keep_mask
        if a.sampling_mask is not None and b.sampling_mask is not None:
            assert a.sampling_mask.tolist() == b.sampling_mask.tolist()
            sets = padded_sets([a.sampling_mask], len(a.token_ids))[0]
            assert (sets == torch.tensor(a.token_ids).unsqueeze(-1)).any(-1).all()


def test_a_mask_wider_than_its_room_is_refused() -> None:
    engine = NativeEngine(tiny_model("qwen2"), ops=plain_ops, max_mask_width=8)
    sampling = SamplingParams(top_k=9, logprobs="processed", keep_mask=True)
    with pytest.raises(ValueError, match=r"top_k=9 ids a token, .* room for 8; build it with max_mask_width=9"):
        engine.generate(requests(prompts(1), sampling))


def test_steps_that_ask_the_device_are_not_captured() -> None:
    model = tiny_model("gemma3_text")
    assert decoder.can_be_captured(model)
    model.config.rope_parameters["full_attention"]["rope_type"] = "dynamic"  # one of two
    assert not decoder.can_be_captured(model)
    assert not decoder.can_be_captured(tiny_model("qwen2_5_vl"))
