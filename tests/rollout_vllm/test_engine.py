"""vLLM in this process against plain transformers, float32; conversations over it against the trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.rollout.base import EngineError, GenerationRequest, SamplingParams
from dovetail.rollout.vllm import VLLMEngine
from dovetail.rollout.vllm.requests import Sample
from tests.agents.exactness import check_engine
from tests.models.tiny import VOCAB_SIZE, tiny_model
from tests.rollout_vllm.conftest import FAMILIES, small_settings
from tests.rollout_vllm.reference import greedy, log_probs, mean_gap, round_sums_as_float32, take_user_output
from tests.rollout_vllm.running import generating, wait_for_tokens

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("vllm")]

PROMPTS = [[5, 6, 7, 8], [250, 9], list(range(3, 290)), [17] * 40]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
QUESTIONS = ["What is the capital of France?", "Write a haiku about rain.", "Who wrote Hamlet?"]


@pytest.fixture
def tiny(engines: dict[str, VLLMEngine]) -> tuple[VLLMEngine, Any]:
    """The untied engine with fresh weights, and the model it must agree with."""
    model = tiny_model("llama")
    engines["llama"].update_weights(model.named_parameters(), 0)
    return engines["llama"], model


def _requests(prompts: list[list[int]], sampling: SamplingParams) -> list[GenerationRequest]:
    return [GenerationRequest(f"r{number}", prompt, sampling) for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(engines: dict[str, VLLMEngine], family: str) -> None:
    model = tiny_model(family)
    engines[family].update_weights(model.named_parameters(), 0)
    results = engines[family].generate(_requests(PROMPTS, GREEDY))
    assert [result.token_ids for result in results] == [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert {result.finish_reason for result in results} == {"length"}


@pytest.mark.slow  # a real model: the tiny ones show the same in `make test`
def test_smollm2_greedy_tokens_and_log_probs_equal_those_of_transformers(smollm2: tuple[VLLMEngine, Any, Any]) -> None:
    engine, model, tokenizer = smollm2
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in QUESTIONS
    ]
    results = engine.generate(_requests(prompts, SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)))
    assert [result.token_ids for result in results] == [greedy(model, prompt, 16) for prompt in prompts]
    sampled = engine.generate(_requests(prompts, SamplingParams(max_new_tokens=24, seed=1, n=2, ignore_eos=True)))

    def scores(model: Any) -> torch.Tensor:
        return torch.cat([log_probs(model, prompts[int(one.request_id[1:])], one.token_ids) for one in sampled])

    exact = copy.deepcopy(model).double()
    truth = scores(exact)
    # The error of transformers is no measure: it sums in MKL's order, vLLM in oneDNN's, which errs 1 to 3 times more.
    round_sums_as_float32(exact)
    bound = (scores(exact) - truth).norm()
    assert (torch.tensor([score for one in sampled for score in one.log_probs]) - truth).norm() <= bound
    wrong = copy.deepcopy(model)
    weight = wrong.model.layers[12].self_attn.o_proj.weight
    weight.data = weight.data.half().float()
    assert (scores(wrong) - truth).norm() > bound, "one matrix in float16 is no rounding of sums"


@pytest.mark.parametrize(
    "cut",
    [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, {"temperature": 1.3, "min_p": 0.1}],
)
def test_log_probs_are_under_the_temperature_and_before_any_cut(tiny: tuple[VLLMEngine, Any], cut: dict) -> None:
    engine, model = tiny
    sampling = SamplingParams(max_new_tokens=16, n=3, seed=5, ignore_eos=True, **cut)
    # A greedy request in the same batch must be neither scaled nor cut.
    mixed = [*_requests(PROMPTS, sampling), GenerationRequest("greedy", PROMPTS[0], GREEDY)]
    for result in engine.generate(mixed):
        prompt = PROMPTS[0] if result.request_id == "greedy" else PROMPTS[int(result.request_id[1:])]
        temperature = 1.0 if result.request_id == "greedy" else sampling.temperature
        assert mean_gap(log_probs(model, prompt, result.token_ids, temperature), result.log_probs) <= 1e-5


def test_a_cut_takes_tokens_out_of_what_is_sampled(tiny: tuple[VLLMEngine, Any]) -> None:
    engine, model = tiny
    sampling = SamplingParams(top_k=2, max_new_tokens=24, n=4, seed=9, ignore_eos=True)
    for result in engine.generate(_requests(PROMPTS[:2], sampling)):
        prompt = PROMPTS[int(result.request_id[1:])]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2, -1).indices
        assert (best == torch.tensor(result.token_ids)[:, None]).any(-1).all()


def test_a_seed_fixes_the_tokens_whatever_else_is_in_the_batch(tiny: tuple[VLLMEngine, Any]) -> None:
    engine, _ = tiny
    sampling = SamplingParams(max_new_tokens=16, n=2, seed=7, ignore_eos=True)
    together = engine.generate(_requests(PROMPTS, sampling))
    alone = engine.generate([GenerationRequest("r0", PROMPTS[0], sampling)])
    assert [result.token_ids for result in together[:2]] == [result.token_ids for result in alone]
    assert alone[0].token_ids != alone[1].token_ids
    assert [(result.request_id, result.sample_index) for result in together[:3]] == [("r0", 0), ("r0", 1), ("r1", 0)]


def test_prompts_that_fill_more_than_one_step_are_read_whole(folders: dict[str, Path]) -> None:
    """vLLM would cut one of them in two, and die of its seed on a CPU."""
    sampling = SamplingParams(temperature=0.8, max_new_tokens=8, n=2, seed=7, ignore_eos=True)
    model = tiny_model("llama_tied")
    settings = small_settings(folders["llama_tied"], max_model_len=300, max_num_batched_tokens=300)
    with VLLMEngine(settings) as engine:
        results = engine.generate(_requests(PROMPTS * 4, sampling))
    assert len(results) == len(PROMPTS) * 8
    for result in results:
        prompt = PROMPTS[int(result.request_id[1:]) % len(PROMPTS)]
        assert mean_gap(log_probs(model, prompt, result.token_ids, 0.8), result.log_probs) <= 1e-5


@pytest.mark.parametrize("keeps_statistics", [True, False])
def test_tokens_read_from_the_core_are_those_that_vllm_hands_to_its_users(
    tiny: tuple[VLLMEngine, Any], monkeypatch: pytest.MonkeyPatch, keeps_statistics: bool
) -> None:
    engine, _ = tiny
    handed: dict[str, Sample] = {}
    step, processor = engine._llm.step, engine._llm.output_processor

    def watched() -> None:
        running = {sample.vllm_id.rpartition("-")[0]: sample for sample in engine._samples()}
        for output in step():
            known = running[output.request_id]
            copy = handed.setdefault(output.request_id, Sample(known.request, known.index, known.vllm_id, known.seed))
            take_user_output(copy, output)

    monkeypatch.setattr(engine._llm, "step", watched)
    monkeypatch.setattr(processor, "_keeps_statistics", keeps_statistics)
    requests = _requests(PROMPTS, SamplingParams(max_new_tokens=16, n=2, seed=7, ignore_eos=True))
    results = engine.generate(requests)
    in_order = sorted(handed.values(), key=lambda sample: (sample.request.request_id, sample.index))
    if keeps_statistics:
        assert [sample.result() for sample in in_order] == results
    else:
        assert [len(sample.token_ids) for sample in in_order] == [1] * len(results), "made for the last token alone"
        assert [sample.token_ids[-1] for sample in in_order] == [result.token_ids[-1] for result in results]
    assert not processor.request_states, "vLLM forgets a request at its end"


def test_an_engine_leaves_the_trainers_settings_of_float32_sums_alone(folders: dict[str, Path]) -> None:
    torch.set_float32_matmul_precision("high")
    with VLLMEngine(small_settings(folders["llama"])) as engine:
        engine.generate(_requests(PROMPTS, GREEDY))
        engine.update_weights(tiny_model("llama").named_parameters(), 1)
    settings = (torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled, torch.get_num_threads())
    assert settings == ("high", True, 1)


def test_generating_leaves_the_trainers_random_numbers_alone(tiny: tuple[VLLMEngine, Any]) -> None:
    engine, _ = tiny
    torch.manual_seed(21)
    expected = torch.rand(3)
    torch.manual_seed(21)
    engine.generate(_requests(PROMPTS, SamplingParams(max_new_tokens=8)))
    assert torch.equal(torch.rand(3), expected)


def test_stop_tokens_are_kept_and_end_of_sequence_can_be_ignored(tiny: tuple[VLLMEngine, Any]) -> None:
    engine, model = tiny
    tokens = greedy(model, PROMPTS[0], 12)
    stop = tokens[4]
    sampling = SamplingParams(temperature=0, max_new_tokens=12, stop_token_ids=(stop,), ignore_eos=True)
    (result,) = engine.generate([GenerationRequest("a", PROMPTS[0], sampling)])
    assert result.token_ids == tokens[: tokens.index(stop) + 1]
    assert result.finish_reason == "stop"
    many = SamplingParams(max_new_tokens=200, n=16, seed=0, temperature=2.0)
    stopped = engine.generate([GenerationRequest("b", [7], many)])
    assert any(result.finish_reason == "stop" and result.token_ids[-1] == 2 for result in stopped)


def test_a_response_ends_where_the_context_ends(tiny: tuple[VLLMEngine, Any]) -> None:
    engine, _ = tiny
    (result,) = engine.generate(
        [GenerationRequest("a", [7] * 505, SamplingParams(max_new_tokens=100, ignore_eos=True))]
    )
    assert (len(result.token_ids), result.finish_reason) == (7, "length")


def test_prompts_that_do_not_fit_are_refused_by_name(tiny: tuple[VLLMEngine, Any]) -> None:
    engine, _ = tiny
    with pytest.raises(ValueError, match="'long' has 512 prompt tokens"):
        engine.generate([GenerationRequest("long", [7] * 512)])
    with pytest.raises(ValueError, match=f"vocabulary is 0 to {VOCAB_SIZE - 1}"):
        engine.generate([GenerationRequest("odd", [VOCAB_SIZE])])
    with pytest.raises(ValueError, match="request_id 'twice' is in use"):
        engine.generate([GenerationRequest("twice", [7])] * 2)


def test_abort_ends_one_request_and_keeps_what_it_wrote(tiny: tuple[VLLMEngine, Any]) -> None:
    engine, model = tiny
    long = SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True)
    running = generating(engine, GenerationRequest("cut", [7], long), GenerationRequest("kept", [8], GREEDY))
    wait_for_tokens(engine, "cut", 15)
    assert engine.abort(["cut"]) == 1
    cut, kept = running.result(120)
    assert cut.finish_reason == "abort"
    assert cut.token_ids == greedy(model, [7], len(cut.token_ids))
    assert kept.token_ids == greedy(model, [8], 12)
    assert engine.health().num_running == 0


def test_an_update_in_the_middle_of_a_paused_generation_goes_on_under_the_new_weights(
    engines: dict[str, VLLMEngine],
) -> None:
    engine, old, new = engines["llama_tied"], tiny_model("llama_tied"), tiny_model("llama_tied", seed=5)
    engine.update_weights(old.named_parameters(), 0)
    prompt = list(range(3, 203))
    sampling = SamplingParams(temperature=0, max_new_tokens=120, ignore_eos=True)
    running = generating(engine, GenerationRequest("long", prompt, sampling))
    wait_for_tokens(engine, "long", 20)
    engine.pause()
    count = len(engine._samples()[0].token_ids)  # not one more under the old weights: see below
    assert engine.health().paused
    engine.update_weights(new.named_parameters(), 9)
    engine.continue_()
    (result,) = running.result(120)
    assert result.weight_versions == [0] * count + [9] * (120 - count)
    head, tail = prompt + result.token_ids[:count], result.token_ids[count:]
    assert result.token_ids[:count] == greedy(old, prompt, count, result.token_ids)
    assert tail == greedy(new, head, 120 - count, tail)
    gap = mean_gap(
        log_probs(new, prompt + result.token_ids[:count], result.token_ids[count:]), result.log_probs[count:]
    )
    assert gap <= 1e-5


def test_a_sleeping_engine_refuses_work_and_says_that_the_memory_stays(tiny: tuple[VLLMEngine, Any]) -> None:
    engine, model = tiny
    assert not engine.frees_memory
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


def test_turns_tools_branches_and_an_update(engines: dict[str, VLLMEngine]) -> None:
    engine = engines["llama_tied"]
    old, new = tiny_model("llama_tied"), tiny_model("llama_tied", seed=1)

    def update() -> None:
        engine.update_weights(new.named_parameters(), 1)

    engine.update_weights(old.named_parameters(), 0)
    try:
        check_engine(engine, {0: old, 1: new}, update, temperature=0.7, top_p=0.9)
    finally:
        engine.update_weights(old.named_parameters(), 0)
