"""After an update, by whatever path, the engine is the new model: caches, tied heads and all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.rollout.base import EngineError, GenerationRequest, SamplingParams, WeightUpdateError
from dovetail.rollout.registry import get_engine_class
from dovetail.rollout.vllm import VLLMEngine, VLLMSettings, weight_calls
from dovetail.rollout.vllm_worker import extension
from dovetail.weight_sync import tensor_checksum
from dovetail.workers.parity import PASS_MARKS
from tests.checksums import weight_checksum
from tests.models.tiny import save_tiny_model, tiny_model
from tests.rollout_vllm.conftest import FAMILIES, small_settings
from tests.rollout_vllm.reference import check_misfits, check_versions, greedy, log_probs, mean_gap
from tests.rollout_vllm.running import num_tokens
from tests.waiting import on_thread

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("vllm")]

# Longer than the 128 tokens of one block of the KV cache, so that its beginning is in the prefix cache.
PROMPT = list(range(3, 290))
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)


def _in_place(engine: VLLMEngine, model: Any, version: int) -> None:
    engine.update_weights(model.named_parameters(), version)


def _shared_memory(engine: VLLMEngine, model: Any, version: int) -> None:
    """The path of workers in other processes."""
    loads = weight_calls.loads_through_shared_memory(model.named_parameters(), 1 << 16)  # layers cut in two
    engine._update(loads, version)


PATHS: dict[str, Callable[[VLLMEngine, Any, int], None]] = {
    "in place": _in_place,
    "shared memory": _shared_memory,
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_after_an_update_the_engine_is_the_new_model(engines: dict[str, VLLMEngine], family: str, path: str) -> None:
    engine, old, new = engines[family], tiny_model(family), tiny_model(family, seed=1)
    engine.update_weights(old.named_parameters(), 0)
    before = engine.generate([GenerationRequest("a", PROMPT, GREEDY)])[0]
    assert before.token_ids == greedy(old, PROMPT, 12)
    PATHS[path](engine, new, 3)
    after = engine.generate([GenerationRequest("a", PROMPT, GREEDY)])[0]
    assert after.token_ids == greedy(new, PROMPT, 12)
    assert after.token_ids != before.token_ids
    assert after.weight_versions == [3] * 12
    assert mean_gap(log_probs(new, PROMPT, after.token_ids), after.log_probs) <= 1e-5
    names = [name for name, _ in new.named_parameters()]
    held = engine.weight_checksums(names)
    assert {name: held[name] for name in names} == weight_checksum(new.named_parameters())


def test_the_prompt_of_these_tests_really_sits_in_the_prefix_cache(engines: dict[str, VLLMEngine]) -> None:
    engine, old, new = engines["llama"], tiny_model("llama"), tiny_model("llama", seed=1)
    engine.update_weights(old.named_parameters(), 0)
    engine.generate([GenerationRequest("a", PROMPT, GREEDY)])
    engine._call_loads(weight_calls.loads_in_place(new.named_parameters()))  # an update that leaves the caches alone
    stale = engine.generate([GenerationRequest("a", PROMPT, GREEDY)])[0]
    assert mean_gap(log_probs(new, PROMPT, stale.token_ids), stale.log_probs) > 0.01


def test_a_quantised_engine_quantises_the_weights_of_an_update(folders: dict[str, Path], tmp_path: Path) -> None:
    """As an engine does that starts from them. Two engines: how vLLM loads again is all its own."""
    new = tiny_model("llama", seed=1)
    folder = save_tiny_model("llama", tmp_path / "new", seed=1)
    # The one of vLLM's methods that has a plain kernel on CPUs.
    quantised = RolloutConfig(name="vllm", quantization="fp8_per_channel")
    kwargs = VLLMSettings.from_config(quantised, folder).engine_kwargs | {"kv_cache_memory_bytes": 64 << 20}

    def answer(engine: VLLMEngine) -> tuple[list[int], list[float]]:
        result = engine.generate([GenerationRequest("a", PROMPT, GREEDY)])[0]
        return result.token_ids, result.log_probs

    with VLLMEngine(small_settings(folders["llama"], dtype="bfloat16", engine_kwargs=kwargs)) as updated:
        before = answer(updated)
        updated.update_weights(new.named_parameters(), 1)
        after, held = answer(updated), updated.weight_checksums([name for name, _ in new.named_parameters()])
    with VLLMEngine(small_settings(folder, dtype="bfloat16", engine_kwargs=kwargs)) as fresh:
        assert answer(fresh) == after != before
    assert 1e-3 < mean_gap(log_probs(new, PROMPT, after[0]), after[1]) < PASS_MARKS["float8_e4m3fn"].mean
    sent = weight_checksum((name, tensor.bfloat16()) for name, tensor in new.named_parameters())
    assert held == {name: sent[name] for name in held}
    assert sent.keys() - held.keys() == {name for name in sent if "_proj" in name}


@pytest.mark.slow  # a real model: the tiny ones show the same in `make test`
def test_smollm2_greedy_tokens_follow_an_update(smollm2: tuple[VLLMEngine, Any, Any]) -> None:
    engine, model, _ = smollm2
    prompt = [1, 500, 600, 700] * 40
    changed = [(name, tensor.detach() * (1.02 if "mlp" in name else 1.0)) for name, tensor in model.named_parameters()]
    original = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    engine.generate([GenerationRequest("a", prompt, GREEDY)])
    engine.update_weights(changed, 1)
    try:
        model.load_state_dict(dict(changed), strict=False)
        result = engine.generate([GenerationRequest("a", prompt, GREEDY)])[0]
        assert result.token_ids == greedy(model, prompt, 12)
        assert mean_gap(log_probs(model, prompt, result.token_ids), result.log_probs) <= 1e-5
    finally:
        model.load_state_dict(original, strict=False)
        engine.update_weights(original.items(), 2)


def test_misfits_are_named_and_the_engine_waits_for_a_whole_update(engines: dict[str, VLLMEngine]) -> None:
    check_misfits(engines["llama"], tiny_model("llama", seed=2), PROMPT)


def test_every_tensor_of_the_source_is_taken_even_after_a_misfit(engines: dict[str, VLLMEngine]) -> None:
    engine, model = engines["llama"], tiny_model("llama")
    taken = []

    def source() -> Any:
        yield "model.extra", model.model.norm.weight
        for name, tensor in model.named_parameters():
            taken.append(name)
            yield name, tensor

    with pytest.raises(WeightUpdateError, match=r"model\.extra"):
        engine.update_weights(source(), 1)
    assert len(taken) == len(list(model.named_parameters()))
    engine.update_weights(model.named_parameters(), 1)


def test_reading_back_finds_a_tied_head_that_vllm_forgot_to_pack(
    engines: dict[str, VLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails once vLLM packs tied heads itself: then `_repack_heads` can go."""
    engine, model = engines["llama_tied"], tiny_model("llama_tied", seed=3)
    with monkeypatch.context() as patch:
        patch.setattr(extension, "_repack_heads", lambda model: None)
        engine.update_weights(model.named_parameters(), 4)
    head = tensor_checksum(model.lm_head.weight)
    assert engine.weight_checksums(["lm_head.weight"])["lm_head.weight"] != head
    engine.update_weights(model.named_parameters(), 4)
    assert engine.weight_checksums(["lm_head.weight"])["lm_head.weight"] == head


def test_every_token_has_the_log_prob_of_its_own_weights_whatever_comes_and_goes_meanwhile(
    engines: dict[str, VLLMEngine],
) -> None:
    """Requests join and are aborted while others run; weights are staged while tokens are written, committed twice."""
    engine, models = engines["llama"], {version: tiny_model("llama", seed=version) for version in (1, 2, 3)}
    sampling = SamplingParams(temperature=0.9, max_new_tokens=120, n=2, seed=3, ignore_eos=True)
    prompts = {"first": PROMPT, "second": PROMPT[:40], "cut": [7]}
    stream = engine.open_stream()
    engine.update_weights(models[1].named_parameters(), 1)
    stream.submit(GenerationRequest("first", PROMPT, sampling))
    _write(engine, "first", 20)
    staging = on_thread(engine.stage_weights, models[2].named_parameters(), 2)
    stream.submit(*(GenerationRequest(name, prompts[name], sampling) for name in ("second", "cut")))
    _write(engine, "cut", 10)
    staging.result(60)
    assert stream.abort(["cut"]) == 2
    assert engine.commit_weights(2) > 0
    _write(engine, "second", 40)
    engine.update_weights(models[3].named_parameters(), 3)
    results = stream.drain()
    assert len(results) == 6
    for result in results:
        check_versions(models, prompts[result.request_id], result, temperature=0.9)
        if result.request_id == "cut":
            assert result.finish_reason == "abort"
            assert set(result.weight_versions) == {1}
        else:
            assert set(result.weight_versions) == {1, 2, 3}
    with pytest.raises(EngineError, match=r"commit_weights\(2\): no weights are staged"):
        engine.commit_weights(2)


def _write(engine: VLLMEngine, name: str, count: int) -> None:
    """Until the request has so many tokens more."""
    start = num_tokens(engine, name)
    engine.wait(lambda: num_tokens(engine, name) >= start + count)


def test_a_staged_update_that_does_not_fit_leaves_the_weights_in_use(engines: dict[str, VLLMEngine]) -> None:
    engine, model = engines["llama"], tiny_model("llama", seed=2)
    engine.update_weights(model.named_parameters(), 4)
    taken: list[str] = []

    def source() -> Any:
        yield "model.extra", model.model.norm.weight
        for name, tensor in tiny_model("llama").named_parameters():
            taken.append(name)
            yield name, tensor

    with pytest.raises(WeightUpdateError, match=r"no tensor 'model\.extra'"):
        engine.stage_weights(source(), 5)
    assert len(taken) == len(list(model.named_parameters())), "other ranks of a sharded source wait for every tensor"
    assert engine.generate([GenerationRequest("a", PROMPT, GREEDY)])[0].token_ids == greedy(model, PROMPT, 12)
    assert engine.weight_version == 4


def test_nothing_is_generated_from_dummy_weights(folders: dict[str, Path]) -> None:
    model = tiny_model("llama", seed=6)
    with VLLMEngine(small_settings(folders["llama"], load_format="dummy")) as engine:
        with pytest.raises(EngineError, match="load_format=dummy"):
            engine.generate([GenerationRequest("a", PROMPT, GREEDY)])
        engine.update_weights(model.named_parameters(), 1)
        assert engine.generate([GenerationRequest("a", PROMPT, GREEDY)])[0].token_ids == greedy(model, PROMPT, 12)
    with pytest.raises(EngineError, match="closed"):
        engine.generate([GenerationRequest("a", PROMPT, GREEDY)])


def test_an_engine_built_from_the_config_waits_for_the_trainers_weights(folders: dict[str, Path]) -> None:
    config = RolloutConfig(
        name="vllm",
        dtype="fp32",
        prompt_length=300,
        response_length=20,
        verify_weights=True,
        engine_kwargs={"vllm": {"kv_cache_memory_bytes": 64 << 20}},
    )
    engine = get_engine_class("vllm").from_config(config, str(folders["llama"]), device=torch.device("cpu"))
    model = tiny_model("llama", seed=7)
    with engine:
        assert "dummy" in engine.health().reason
        engine.update_weights(model.named_parameters(), 1)
        assert engine.generate([GenerationRequest("a", PROMPT, GREEDY)])[0].token_ids == greedy(model, PROMPT, 12)


def test_closing_one_engine_leaves_the_others_alone(engines: dict[str, VLLMEngine], folders: dict[str, Path]) -> None:
    VLLMEngine(small_settings(folders["llama"])).close()
    model = tiny_model("llama", seed=8)
    engines["llama"].update_weights(model.named_parameters(), 1)
    result = engines["llama"].generate([GenerationRequest("a", PROMPT, GREEDY)])[0]
    assert result.token_ids == greedy(model, PROMPT, 12)


def test_processed_and_raw_engines_mean_what_they_say(folders: dict[str, Path]) -> None:
    from tests.rollout_vllm.reference import top_k_top_p_log_probs

    model = tiny_model("llama")
    cut = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    for mode in ("processed", "raw"):
        sampling = SamplingParams(max_new_tokens=16, n=3, seed=1, ignore_eos=True, logprobs=mode, **cut)
        with VLLMEngine(small_settings(folders["llama"], logprobs=mode)) as engine:
            for result in engine.generate([GenerationRequest("a", PROMPT, sampling)]):
                if mode == "raw":
                    wanted = log_probs(model, PROMPT, result.token_ids)
                else:
                    wanted = top_k_top_p_log_probs(model, PROMPT, result.token_ids, **cut)
                assert mean_gap(wanted, result.log_probs) <= 1e-5
