"""SGLang against plain transformers, float32: what it writes, what its log-probs mean, what it is asked in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.rollout.base import (
    EngineError,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    UnsupportedPromptError,
)
from dovetail.rollout.sglang import SGLangRollout
from tests.models.tiny import VOCAB_SIZE, tiny_model
from tests.rollout_sglang.conftest import Running, needs_sglang, num_tokens
from tests.rollout_vllm.reference import greedy, log_probs, mean_gap

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.xdist_group("sglang"), needs_sglang]

PROMPTS = [[5, 6, 7, 8], [250, 9], list(range(3, 290)), [17] * 40]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_new_tokens=160, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True)
"""For what must still run when something else is done, on a busy machine, too."""


@pytest.fixture
def model(engine: SGLangRollout) -> Any:
    """The model that the engine has, whatever the test before left in it."""
    model = tiny_model("llama_tied")
    engine.update_weights(model.named_parameters(), 0)  # always: versions repeat between tests
    return model


def _requests(prompts: list[list[int]], sampling: SamplingParams) -> list[GenerationRequest]:
    return [GenerationRequest(f"r{number}", prompt, sampling) for number, prompt in enumerate(prompts)]


def test_greedy_tokens_equal_those_of_transformers(engine: SGLangRollout, model: Any) -> None:
    results = engine.generate(_requests(PROMPTS, GREEDY))
    assert [result.token_ids for result in results] == [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert {result.finish_reason for result in results} == {"length"}
    assert engine.health().kv_cache_bytes > 0


@pytest.mark.parametrize(
    "cut",
    [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, {"temperature": 1.3, "min_p": 0.1}],
)
def test_log_probs_are_under_the_temperature_and_before_any_cut(engine: SGLangRollout, model: Any, cut: dict) -> None:
    sampling = SamplingParams(max_new_tokens=16, n=3, ignore_eos=True, **cut)
    # A greedy request in the same batch must be neither scaled nor cut.
    mixed = [*_requests(PROMPTS, sampling), GenerationRequest("greedy", PROMPTS[0], GREEDY)]
    results = engine.generate(mixed)
    assert [(result.request_id, result.sample_index) for result in results[:4]] == [
        *(("r0", index) for index in range(3)),
        ("r1", 0),
    ]
    for result in results:
        prompt = PROMPTS[0] if result.request_id == "greedy" else PROMPTS[int(result.request_id[1:])]
        temperature = 1.0 if result.request_id == "greedy" else sampling.temperature
        assert mean_gap(log_probs(model, prompt, result.token_ids, temperature), result.log_probs) <= 1e-5


def test_a_cut_takes_tokens_out_of_what_is_sampled(engine: SGLangRollout, model: Any) -> None:
    sampling = SamplingParams(top_k=2, max_new_tokens=24, n=4, ignore_eos=True)
    for result in engine.generate(_requests(PROMPTS[:2], sampling)):
        prompt = PROMPTS[int(result.request_id[1:])]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2, -1).indices
        assert (best == torch.tensor(result.token_ids)[:, None]).any(-1).all()


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_stop_tokens_are_kept_and_always_stop(engine: SGLangRollout, model: Any, ignore_eos: bool) -> None:
    tokens = greedy(model, PROMPTS[0], 12)
    stop = tokens[4]
    sampling = SamplingParams(temperature=0, max_new_tokens=12, stop_token_ids=(stop,), ignore_eos=ignore_eos)
    (result,) = engine.generate([GenerationRequest("a", PROMPTS[0], sampling)])
    assert result.token_ids == tokens[: tokens.index(stop) + 1]
    assert len(result.log_probs) == len(result.token_ids)
    assert result.finish_reason == "stop"


def test_the_models_end_of_sequence_token_stops(engine: SGLangRollout, model: Any) -> None:
    many = SamplingParams(max_new_tokens=200, n=12, temperature=2.0)
    stopped = engine.generate([GenerationRequest("b", [7], many)])
    assert any(result.finish_reason == "stop" and result.token_ids[-1] == 2 for result in stopped)


def test_a_response_ends_where_the_context_ends(engine: SGLangRollout, model: Any) -> None:
    sampling = SamplingParams(temperature=0, max_new_tokens=100, ignore_eos=True)
    (result,) = engine.generate([GenerationRequest("a", [7] * 505, sampling)])
    assert (len(result.token_ids), result.finish_reason) == (7, "length")
    assert result.token_ids == greedy(model, [7] * 505, 7)


def test_requests_that_cannot_be_served_are_refused_by_name(engine: SGLangRollout, model: Any) -> None:
    with pytest.raises(ValueError, match="'long' has 512 prompt tokens"):
        engine.generate([GenerationRequest("long", [7] * 512)])
    with pytest.raises(ValueError, match=f"vocabulary is 0 to {VOCAB_SIZE - 1}"):
        engine.generate([GenerationRequest("odd", [VOCAB_SIZE])])
    with pytest.raises(ValueError, match="request_id 'twice' is in use"):
        engine.generate([GenerationRequest("twice", [7])] * 2)
    with pytest.raises(ValueError, match=r"logprobs='processed'.*gives 'temperature'"):
        engine.generate([GenerationRequest("cut", [7], SamplingParams(top_k=3, logprobs="processed"))])
    with pytest.raises(UnsupportedPromptError, match="holds image"):
        engine.generate([GenerationRequest("seen", [7], multi_modal={"image": []})])


def _aborted(engine: SGLangRollout) -> tuple[int, GenerationResult, GenerationResult]:
    """Tokens of a request before it is aborted, the request, and one beside it. An abort may take half a second, and on
    a busy machine the request may be complete by then, which shows nothing: three times at most."""
    for too_late_again in (True, True, True, False):
        running = Running(engine, [GenerationRequest("cut", [7], ENDLESS), GenerationRequest("kept", [8], LONG)])
        written = running.paused_after(5)["cut"]
        engine.continue_()
        num_met = engine.abort(["cut"])
        cut, kept = running.join(120)
        if len(cut.token_ids) < ENDLESS.max_new_tokens or not too_late_again:
            break
    assert (num_met, cut.finish_reason) == (1, "abort")
    return written, cut, kept


def test_abort_ends_one_request_and_keeps_what_it_wrote(engine: SGLangRollout, model: Any) -> None:
    written, cut, kept = _aborted(engine)
    assert len(cut.token_ids) >= written
    assert cut.token_ids == greedy(model, [7], len(cut.token_ids), cut.token_ids)
    assert kept.token_ids == greedy(model, [8], 160, kept.token_ids)
    assert engine.health().num_running == 0


def test_no_request_is_lost_however_often_it_is_interrupted_and_aborted(engine: SGLangRollout, model: Any) -> None:
    """SGLang echoes some aborts late. Under one name for all calls of a request this hung within five rounds."""
    expected = greedy(model, [8], LONG.max_new_tokens)
    for _ in range(6):
        _, _, kept = _aborted(engine)
        assert (kept.finish_reason, kept.token_ids) == ("length", expected)


def test_what_is_paused_can_be_aborted(engine: SGLangRollout, model: Any) -> None:
    running = Running(engine, [GenerationRequest("cut", [7], LONG)])
    count = running.paused_after(5)["cut"]
    assert engine.abort() == 1
    (cut,) = running.join(30)
    assert (cut.finish_reason, len(cut.token_ids)) == ("abort", count)
    engine.continue_()


def test_an_update_in_the_middle_of_a_paused_generation_goes_on_under_the_new_weights(
    engine: SGLangRollout, model: Any
) -> None:
    new = tiny_model("llama_tied", seed=5)
    prompts = {"long": list(range(3, 203)), "short": [9, 8, 7]}
    running = Running(engine, [GenerationRequest(name, prompt, LONG) for name, prompt in prompts.items()])
    written = running.paused_after(10)
    health = engine.health()
    assert (health.paused, health.num_waiting, health.num_running) == (True, 2, 0)
    engine.update_weights(new.named_parameters(), 9)
    assert num_tokens(engine) == written
    engine.continue_()
    for result in running.join(120):
        prompt, count = prompts[result.request_id], written[result.request_id]
        head, tail = prompt + result.token_ids[:count], result.token_ids[count:]
        assert result.weight_versions == [0] * count + [9] * (160 - count)
        assert result.token_ids[:count] == greedy(model, prompt, count, result.token_ids)
        assert tail == greedy(new, head, 160 - count, tail)
        assert mean_gap(log_probs(new, head, tail), result.log_probs[count:]) <= 1e-5


def test_an_update_does_not_wait_for_what_is_running(engine: SGLangRollout, model: Any) -> None:
    new = tiny_model("llama_tied", seed=6)
    running = Running(engine, [GenerationRequest("long", [5, 6, 7], LONG)])
    running.paused_after(5)
    engine.continue_()
    engine.update_weights(new.named_parameters(), 3)
    (result,) = running.join(120)
    count = result.weight_versions.count(0)
    assert result.weight_versions == [0] * count + [3] * (160 - count)
    assert 5 <= count < 160
    head, tail = [5, 6, 7, *result.token_ids[:count]], result.token_ids[count:]
    assert tail == greedy(new, head, 160 - count, tail)


def test_a_sleeping_engine_refuses_work_and_waking_what_is_awake_does_no_harm(
    engine: SGLangRollout, model: Any
) -> None:
    assert not engine.frees_memory
    engine.wake()  # SGLang itself dies of this
    running = Running(engine, [GenerationRequest("long", [7], ENDLESS)])
    running.paused_after(1)
    engine.continue_()
    with pytest.raises(EngineError, match="requests are running"):  # and of this
        engine.sleep()
    engine.abort()
    running.join(30)
    engine.sleep()
    assert engine.health().asleep == {"weights", "kv_cache"}
    with pytest.raises(EngineError, match="asleep"):
        engine.generate([GenerationRequest("a", [7], GREEDY)])
    with pytest.raises(EngineError, match=r"wake\(\['weights'\]\)"):
        engine.update_weights(model.named_parameters(), 1)
    engine.wake(["weights"])
    engine.update_weights(model.named_parameters(), 1)
    engine.wake(["kv_cache"])
    (result,) = engine.generate([GenerationRequest("a", [7], GREEDY)])
    assert result.token_ids == greedy(model, [7], 12)
    assert result.weight_versions == [1] * 12
