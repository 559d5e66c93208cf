"""The engine in a real Ray actor: weights change in the middle of a generation, processes die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.controller.cluster import start_ray, stop_ray
from dovetail.controller.process_state import stopped_processes
from dovetail.rollout.base import EngineError, GenerationRequest, SamplingParams, WeightUpdateError
from dovetail.rollout.vllm.ray_engine import RayVLLMEngine
from tests.models.tiny import tiny_model
from tests.rollout_vllm.conftest import small_settings
from tests.rollout_vllm.reference import check_versions, greedy, log_probs, mean_gap
from tests.rollout_vllm.running import generating, num_tokens, wait_for_tokens
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

PROMPT = list(range(3, 203))
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_new_tokens=300, ignore_eos=True)


@pytest.fixture(scope="module")
def _engines() -> Iterator[list[RayVLLMEngine]]:
    start_ray(num_cpus=2, object_store_memory=256 << 20)
    engines: list[RayVLLMEngine] = []
    yield engines
    for engine in engines:
        engine.close()
    stop_ray()


@pytest.fixture
def engine(_engines: list[RayVLLMEngine], folders: dict[str, Path]) -> RayVLLMEngine:
    """With the weights of seed 0, whatever a test before has done; started again where one has killed it."""
    if _engines and not _engines[0].health().ok:
        _engines.pop().close()
    if not _engines:
        _engines.append(RayVLLMEngine(small_settings(folders["llama_tied"]), bucket_bytes=1 << 16))
    _engines[0].update_weights(tiny_model("llama_tied").named_parameters(), 0)
    return _engines[0]


def test_an_update_makes_the_engine_the_new_model(engine: RayVLLMEngine) -> None:
    version = 14
    model = tiny_model("llama_tied", seed=version)
    engine.update_weights(model.named_parameters(), version)
    (result,) = engine.generate([GenerationRequest("a", PROMPT, GREEDY)])
    assert result.token_ids == greedy(model, PROMPT, 12)
    assert result.weight_versions == [version] * 12
    assert engine.health().weight_version == version


@pytest.mark.parametrize("paused_first", [True, False])
def test_an_update_in_the_middle_of_a_generation_continues_under_the_new_weights(
    engine: RayVLLMEngine, paused_first: bool
) -> None:
    old, new = tiny_model("llama_tied"), tiny_model("llama_tied", seed=5)
    engine.update_weights(old.named_parameters(), 1)
    running = generating(engine, GenerationRequest("long", PROMPT, LONG))
    wait_for_tokens(engine, "long", 20)
    if paused_first:
        engine.pause()
        written = num_tokens(engine, "long")
    engine.update_weights(new.named_parameters(), 2)
    if paused_first:
        engine.continue_()
    (result,) = running.result(60)
    count = result.weight_versions.count(1)
    assert 20 <= count < 300
    assert not paused_first or count == written, "a paused engine writes nothing"
    assert result.weight_versions == [1] * count + [2] * (300 - count)
    assert result.token_ids[:count] == greedy(old, PROMPT, count, result.token_ids)
    head, tail = PROMPT + result.token_ids[:count], result.token_ids[count:]
    assert tail == greedy(new, head, 300 - count, tail)
    assert mean_gap(log_probs(new, head, tail), result.log_probs[count:]) <= 1e-5


def test_abort_ends_a_request_with_what_it_wrote(engine: RayVLLMEngine) -> None:
    running = generating(engine, GenerationRequest("cut", PROMPT, LONG))
    wait_for_tokens(engine, "cut", 10)
    assert engine.abort(["cut"]) == 1
    (result,) = running.result(30)
    assert result.finish_reason == "abort"
    assert 10 <= len(result.token_ids) < 300


def test_a_misfit_is_named_and_requests_that_are_running_go_on_with_the_weights_they_had(engine: RayVLLMEngine) -> None:
    old, new = tiny_model("llama_tied"), tiny_model("llama_tied", seed=1)
    weights = dict(new.named_parameters())
    running = generating(engine, GenerationRequest("long", PROMPT, LONG))
    wait_for_tokens(engine, "long", 5)
    with pytest.raises(WeightUpdateError, match=r"no tensor was given for model\.norm\.weight"):
        engine.update_weights([item for item in weights.items() if item[0] != "model.norm.weight"], 7)
    (result,) = running.result(60)
    assert result.token_ids == greedy(old, PROMPT, 300, result.token_ids)
    assert result.weight_versions == [0] * 300
    engine.update_weights(weights.items(), 8)
    assert engine.generate([GenerationRequest("a", PROMPT, GREEDY)])[0].token_ids == greedy(new, PROMPT, 12)


def test_requests_join_while_others_run_and_weights_are_staged_meanwhile(engine: RayVLLMEngine) -> None:
    """Every token's log-prob is that of the weights which its version names."""
    models = {version: tiny_model("llama_tied", seed=version) for version in (1, 2, 3)}
    sampling = SamplingParams(temperature=0.9, max_new_tokens=300, n=2, seed=3, ignore_eos=True)
    engine.update_weights(models[1].named_parameters(), 1)
    first = generating(engine, GenerationRequest("first", PROMPT, sampling))
    wait_for_tokens(engine, "first", 20)
    engine.stage_weights(models[2].named_parameters(), 2)
    assert engine.health().weight_version == 1
    engine.pause()
    second = generating(engine, GenerationRequest("second", PROMPT[:50], sampling), GenerationRequest("cut", [7], LONG))
    assert engine.commit_weights(2) > 0
    engine.continue_()
    wait_for_tokens(engine, "second", 40)
    engine.pause()
    assert engine.abort(["cut"]) == 1
    engine.update_weights(models[3].named_parameters(), 3)
    engine.continue_()
    for result in first.result(120):
        assert set(result.weight_versions) >= {1, 2}
        check_versions(models, PROMPT, result, temperature=0.9)
    *complete, cut = second.result(120)
    for result in complete:
        assert set(result.weight_versions) == {2, 3}
        check_versions(models, PROMPT[:50], result, temperature=0.9)
    assert cut.finish_reason == "abort"
    check_versions(models, [7], cut, temperature=1.0)


def test_many_requests_at_once_each_get_their_own_answer(engine: RayVLLMEngine) -> None:
    model = tiny_model("llama_tied")
    engine.update_weights(model.named_parameters(), 3)
    prompts = [[5 + number, 9, 11] for number in range(40)]
    sampling = SamplingParams(temperature=0, max_new_tokens=6, n=2, ignore_eos=True)
    results = engine.generate([GenerationRequest(str(n), prompt, sampling) for n, prompt in enumerate(prompts)])
    assert [(r.request_id, r.sample_index) for r in results[:3]] == [("0", 0), ("0", 1), ("1", 0)]
    assert [r.token_ids for r in results[::2]] == [greedy(model, prompt, 6) for prompt in prompts]


def _pid(engine: RayVLLMEngine) -> int:
    import ray

    return ray.get(engine.actor.__ray_call__.remote(lambda self: os.getpid()))


def test_a_stopped_actor_is_seen_by_whoever_watches_the_process_that_drives_it(engine: RayVLLMEngine) -> None:
    """The watchdog of the driver asks for its workers; Ray has started the actor, so it is no child of one."""
    pid, worker = _pid(engine), os.getpid()
    assert worker not in stopped_processes([worker])
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: worker in stopped_processes([worker]), "the actor's state in the process table")
        assert stopped_processes([worker])[worker].pid == pid
    finally:
        os.kill(pid, signal.SIGCONT)
    assert engine.health().ok


def test_an_engine_killed_in_mid_batch_is_replaced_as_often_as_allowed_and_then_reported(engine: RayVLLMEngine) -> None:
    _finish_the_batch_on_a_new_engine(engine)
    _say_what_died(engine)


def _finish_the_batch_on_a_new_engine(engine: RayVLLMEngine) -> None:
    model = tiny_model("llama_tied", seed=4)
    engine.update_weights(model.named_parameters(), 6)
    engine.restarts_left = 1
    engine.reload_weights = lambda fresh: fresh.update_weights(model.named_parameters(), 6)
    requests = [GenerationRequest(f"short {n}", [*PROMPT, 5 + n], GREEDY) for n in range(3)]
    requests += [GenerationRequest(f"long {n}", [*PROMPT, 9 + n], LONG) for n in range(2)]
    pid = _pid(engine)
    running = generating(engine, *requests)
    wait_for_tokens(engine, "long 1", 40)
    os.kill(pid, signal.SIGKILL)
    results = running.result(180)
    assert [result.request_id for result in results] == [request.request_id for request in requests]
    for request, result in zip(requests, results, strict=True):
        prompt, count = list(request.prompt_token_ids), request.sampling.max_new_tokens
        assert result.token_ids == greedy(model, prompt, count, result.token_ids)
    assert {version for result in results for version in result.weight_versions} == {6}
    assert engine.restarts_left == 0


def _say_what_died(engine: RayVLLMEngine) -> None:
    pid = _pid(engine)
    running = generating(engine, GenerationRequest("lost", PROMPT, LONG))
    wait_for_tokens(engine, "lost", 5)
    os.kill(pid, signal.SIGKILL)
    assert "process of the vLLM engine died" in str(running.exception(60))
    assert not engine.health().ok
    with pytest.raises(EngineError, match="process of the vLLM engine died"):
        engine.generate([GenerationRequest("a", PROMPT, GREEDY)])
