"""Requests that come and go on the embedded engine: every token has the log-prob of the weights that wrote it."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.observability.progress import progress, restart_progress
from dovetail.rollout import GenerationRequest, GenerationResult, SamplingParams
from dovetail.rollout.base import EngineError, WeightUpdateError
from dovetail.rollout.native.engine import NativeEngine
from tests.models.tiny import tiny_model
from tests.rollout.test_native_engine import plain_log_probs, prompts
from tests.waiting import on_thread

pytestmark = pytest.mark.unit

LONG = SamplingParams(max_new_tokens=40, ignore_eos=True, seed=7)
SHORT = SamplingParams(max_new_tokens=4, ignore_eos=True, seed=9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def changed(model: Any, factor: float) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(factor)
    return other


def check_log_probs(result: GenerationResult, prompt: list[int], models: dict[int, Any]) -> None:
    """Against a plain forward over the whole sequence, of the model that wrote each token."""
    assert result.weight_versions == sorted(result.weight_versions)
    for version, model in models.items():
        want = plain_log_probs(model, prompt, result.token_ids)
        for place, (got, wrote) in enumerate(zip(result.log_probs, result.weight_versions, strict=True)):
            if wrote == version:
                assert got == pytest.approx(want[place].item(), abs=1e-5)


def step_until(engine: NativeEngine, tokens: int) -> None:
    """An engine in this process goes on while some thread waits for it."""
    engine.wait(lambda: engine.stats.decode_tokens >= tokens)


def test_generation_counts_what_it_computes(folder: Path) -> None:
    """So that a call that takes long is not taken for one that hangs."""
    restart_progress()
    NativeEngine(folder).generate([GenerationRequest("a", prompts(1)[0], LONG)])
    assert progress() > LONG.max_new_tokens


def test_requests_join_are_aborted_and_outlive_two_updates(folder: Path) -> None:
    engine = NativeEngine(folder)
    first = tiny_model("llama")
    models = {0: first, 1: changed(first, 1.2), 2: changed(first, 0.8)}
    rows = prompts(3, seed=2)
    with engine.open_stream() as stream:
        stream.submit(GenerationRequest("long", rows[0], LONG))
        step_until(engine, 5)
        stream.submit(GenerationRequest("cut", rows[1], LONG), GenerationRequest("short", rows[2], SHORT))
        engine.stage_weights(models[1].named_parameters(), 1)
        assert engine.weight_version == 0
        step_until(engine, 8)
        assert engine.commit_weights(1) > 0
        (early,) = stream.results()
        so_far = {result.request_id: result for result in stream.partial()}
        assert stream.abort(["cut"]) == 1
        engine.update_weights(models[2].named_parameters(), 2)
        late = {result.request_id: result for result in stream.drain()}
    assert (early.request_id, early.finish_reason, len(early.token_ids)) == ("short", "length", 4)
    assert {name: part.finish_reason for name, part in so_far.items()} == {"long": "running", "cut": "running"}
    assert (late["cut"].finish_reason, late["long"].finish_reason) == ("abort", "length")
    assert late["cut"].token_ids == so_far["cut"].token_ids
    assert late["long"].token_ids[: len(so_far["long"].token_ids)] == so_far["long"].token_ids
    assert set(late["long"].weight_versions) == {0, 1, 2}
    for result, row in ((late["long"], rows[0]), (late["cut"], rows[1]), (early, rows[2])):
        check_log_probs(result, row, models)


def test_a_sample_continued_alone_draws_the_numbers_it_would_have_drawn() -> None:
    engine = NativeEngine(tiny_model("llama"))
    (row,) = prompts(1)
    sampling = SamplingParams(n=3, max_new_tokens=12, ignore_eos=True, seed=5)
    whole = engine.generate([GenerationRequest("all", row, sampling)])
    for index, result in enumerate(whole):
        rest = SamplingParams(max_new_tokens=7, ignore_eos=True, seed=5)
        prompt = [*row, *result.token_ids[:5]]
        (alone,) = engine.generate([GenerationRequest("one", prompt, rest, sample_index=index)])
        assert alone.sample_index == index
        assert alone.token_ids == result.token_ids[5:]


def test_two_streams_share_an_engine_and_each_gets_its_own_results() -> None:
    engine = NativeEngine(tiny_model("llama"))
    rows = prompts(6, seed=4)
    requests = [GenerationRequest(str(i), row, LONG) for i, row in enumerate(rows)]
    alone = [engine.generate([request])[0] for request in requests]

    def consume(half: int) -> list[GenerationResult]:
        results = []
        with engine.open_stream() as stream:
            stream.submit(*requests[half::2])
            while stream.num_running:
                results += stream.results(timeout=60)
        return results

    for half, consuming in enumerate([on_thread(consume, half) for half in (0, 1)]):
        seen = sorted(consuming.result(60), key=lambda result: result.request_id)
        assert [result.token_ids for result in seen] == [result.token_ids for result in alone[half::2]]


def test_a_request_that_comes_during_a_step_does_not_wait_for_it_and_gets_the_tokens_it_gets_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, rows = tiny_model("llama"), prompts(2, seed=3)
    requests = [GenerationRequest("first", rows[0], LONG), GenerationRequest("second", rows[1], SHORT, session="s")]
    alone = {request.request_id: NativeEngine(model).generate([request])[0] for request in requests}
    engine, in_step, may_end = NativeEngine(model), threading.Event(), threading.Event()
    step, results = engine._batch.step, []

    def slow_step(version: int) -> bool:
        in_step.set()
        assert may_end.wait(10), "whoever submits waits for the step"
        return step(version)

    monkeypatch.setattr(engine._batch, "step", slow_step)
    with engine.open_stream() as stream, engine.open_stream() as other:
        stream.submit(requests[0])
        driving = threading.Thread(target=lambda: results.extend(stream.drain(60)), daemon=True)
        driving.start()
        assert in_step.wait(60)
        stream.submit(requests[1])
        stream.end_session("of somebody else")
        with pytest.raises(ValueError, match="'second' is in use"):
            other.submit(requests[1])
        may_end.set()
        driving.join(60)
    assert sorted(result.request_id for result in results) == ["first", "second"]
    for result in results:
        assert result.token_ids == alone[result.request_id].token_ids
        assert result.log_probs == pytest.approx(alone[result.request_id].log_probs, abs=1e-5)


def test_what_is_refused_leaves_the_stream_and_the_weights_as_they_were(folder: Path) -> None:
    engine = NativeEngine(folder)
    (row,) = prompts(1)
    with engine.open_stream() as stream:
        with pytest.raises(ValueError, match="'bad' has 0 prompt tokens"):
            stream.submit(GenerationRequest("good", row, SHORT), GenerationRequest("bad", [], SHORT))
        assert stream.num_running == 0
        assert stream.results() == []
        with pytest.raises(ValueError, match="request_id 'a' is in use"):
            stream.submit(GenerationRequest("a", row, SHORT), GenerationRequest("a", row, SHORT))
        stream.submit(GenerationRequest("a", row, SHORT))
        with pytest.raises(ValueError, match="request_id 'a' is in use"):
            engine.generate([GenerationRequest("a", row, SHORT)])
        before = stream.drain()
    with pytest.raises(WeightUpdateError, match="no tensor was given for"):
        engine.stage_weights([], 1)
    with pytest.raises(EngineError, match=r"commit_weights\(1\): no weights are staged"):
        engine.commit_weights(1)
    assert engine.generate([GenerationRequest("a", row, SHORT)]) == before
    with pytest.raises(ValueError, match="this stream is closed"):
        stream.submit(GenerationRequest("a", row, SHORT))


def test_a_wait_with_a_timeout_ends_while_the_engine_is_paused() -> None:
    engine = NativeEngine(tiny_model("llama"))
    (row,) = prompts(1)
    with engine.open_stream() as stream:
        stream.submit(GenerationRequest("a", row, SHORT))
        engine.pause()
        assert stream.results(timeout=0.05) == []
        with pytest.raises(TimeoutError, match="1 requests did not finish"):
            stream.drain(timeout=0.05)
        engine.continue_()
        assert len(stream.drain()) == 1
