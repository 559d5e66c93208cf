"""The embedded engine under control: weight updates, pause, abort, sleep, several threads, shared memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.models.weights import to_checkpoint_tensors
from dovetail.rollout import EngineError, GenerationResult, SamplingParams, WeightUpdateError
from dovetail.rollout.native.engine import NativeEngine
from tests.models.tiny import save_tiny_model, tiny_model
from tests.rollout.test_native_engine import plain_log_probs, prompts, requests, tokens, transformers_greedy
from tests.waiting import on_thread, wait_until

pytestmark = pytest.mark.engine

GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)


def weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, parameter.detach()) for name, parameter in model.named_parameters())


def greedy_of(model: Any, rows: list[list[int]]) -> list[list[int]]:
    return [transformers_greedy(model, row, 12) for row in rows]


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("names", ["in memory", "on disk"])
def test_after_an_update_greedy_tokens_are_the_new_models(family: str, names: str, tmp_path: Path) -> None:
    engine = NativeEngine(save_tiny_model(family, tmp_path, tokenizer=False))
    old, new = tiny_model(family), tiny_model(family, seed=1)
    rows = prompts(4)
    before = engine.generate(requests(rows, GREEDY))
    assert tokens(before) == greedy_of(old, rows)
    assert {v for r in before for v in r.weight_versions} == {0}
    engine.update_weights(weights(new) if names == "in memory" else to_checkpoint_tensors(new, weights(new)), version=7)
    after = engine.generate(requests(rows, GREEDY))
    assert tokens(after) == greedy_of(new, rows) != tokens(before)
    assert {v for r in after for v in r.weight_versions} == {7}
    assert engine.weight_version == engine.health().weight_version == 7


def test_tensors_that_do_not_fit_are_named_and_the_engine_refuses_to_generate_until_mended(tmp_path: Path) -> None:
    engine = NativeEngine(save_tiny_model("llama", tmp_path, tokenizer=False))
    good = dict(weights(tiny_model("llama", seed=1)))
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(WeightUpdateError, match=r"no tensor 'model\.layers\.9\.extra\.weight'"):
        engine.update_weights([*good.items(), ("model.layers.9.extra.weight", torch.zeros(3))], 1)
    with pytest.raises(WeightUpdateError, match=rf"'{name}' has shape \(2, 128\).*\(160, 128\)"):
        engine.update_weights((good | {name: torch.zeros(2, 128)}).items(), 1)
    with pytest.raises(WeightUpdateError, match=f"no tensor was given for {name}"):
        engine.update_weights([item for item in good.items() if item[0] != name], 1)
    assert engine.health().reason == "the weight update to version 1 did not finish"
    with pytest.raises(EngineError, match="no usable weights"):
        engine.generate(requests([[5]], GREEDY))
    engine.update_weights(good.items(), 2)
    assert engine.health().ok
    assert tokens(engine.generate(requests([[5]], GREEDY))) == greedy_of(tiny_model("llama", seed=1), [[5]])


@pytest.mark.parametrize("sampling", [SamplingParams(top_k=5, top_p=0.9, max_new_tokens=12), GREEDY])
def test_logits_that_are_no_numbers_are_an_error_that_names_the_weights(
    sampling: SamplingParams, tmp_path: Path
) -> None:
    engine = NativeEngine(save_tiny_model("llama", tmp_path, tokenizer=False))
    good = dict(weights(tiny_model("llama", seed=1)))
    rows = prompts(4)
    engine.update_weights((good | {"model.norm.weight": torch.full((128,), torch.nan)}).items(), 1)
    with pytest.raises(EngineError, match=r"not finite.*its weights or its activations"):
        engine.generate(requests(rows, sampling))
    engine.update_weights(good.items(), 2)
    assert tokens(engine.generate(requests(rows, GREEDY))) == greedy_of(tiny_model("llama", seed=1), rows)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    engine = NativeEngine(save_tiny_model("qwen3_moe", tmp_path, tokenizer=False))
    model = tiny_model("qwen3_moe", seed=1)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    with pytest.raises(WeightUpdateError, match=f"no tensor was given for {name}"):
        engine.update_weights((i for i in to_checkpoint_tensors(model, weights(model)) if i[0] != name), 1)


def test_an_update_during_a_pause_continues_under_the_new_weights(tmp_path: Path) -> None:
    engine = NativeEngine(save_tiny_model("qwen3", tmp_path, tokenizer=False), max_num_seqs=3)
    old, new = tiny_model("qwen3"), tiny_model("qwen3", seed=1)
    rows = prompts(3, seed=1)
    sampling = SamplingParams(temperature=0, n=2, max_new_tokens=100, ignore_eos=True)
    running = on_thread(engine.generate, requests(rows, sampling))
    wait_until(lambda: engine.stats.decode_steps >= 3, "the first steps")
    engine.pause()
    steps = engine.stats.decode_steps
    assert steps < 100, "the pause came too late to test anything"
    engine.update_weights(weights(new), version=1)
    engine.continue_()
    results = running.result(60)
    assert {v for r in results for v in r.weight_versions} == {0, 1}
    assert results[0].weight_versions.count(0) == steps
    for r in results:
        row = rows[int(r.request_id[1:])]
        assert r.weight_versions == sorted(r.weight_versions)
        num_old = r.weight_versions.count(0)
        # Each part is greedy under its own weights; the second part reads a cache made by the new weights alone.
        assert r.token_ids[:num_old] == transformers_greedy(old, row, max(num_old, 1))[:num_old]
        head = row + r.token_ids[:num_old]
        if r.sample_index == 0:
            assert r.token_ids[num_old:] == transformers_greedy(new, head, 100 - num_old, r.token_ids[num_old:])
        gap = torch.tensor(r.log_probs[num_old:]) - plain_log_probs(new, head, r.token_ids[num_old:])
        assert gap.abs().mean() <= 1e-5


def test_abort_returns_what_was_written() -> None:
    model = tiny_model("llama")
    engine = NativeEngine(model)
    rows = prompts(2, seed=2)
    asked = requests(rows, SamplingParams(temperature=0, max_new_tokens=150, ignore_eos=True))
    running = on_thread(engine.generate, asked)
    wait_until(lambda: engine.stats.decode_steps >= 3, "the first steps")
    engine.pause()
    assert engine.abort(["r1", "unknown"]) == 1
    engine.continue_()
    whole, cut = running.result(60)
    assert (whole.finish_reason, cut.finish_reason) == ("length", "abort")
    assert 3 <= len(cut.token_ids) < len(whole.token_ids)
    assert cut.token_ids == transformers_greedy(model, rows[1], len(cut.token_ids))
    assert len(cut.log_probs) == len(cut.weight_versions) == len(cut.token_ids)
    assert engine.abort() == 0


def test_several_threads_share_the_batch() -> None:
    model = tiny_model("llama")
    engine = NativeEngine(model, max_num_seqs=8)
    rows = prompts(12, seed=3)
    threads = [on_thread(engine.generate, [request]) for request in requests(rows, GREEDY)]
    assert [thread.result(60)[0].token_ids for thread in threads] == greedy_of(model, rows)


def test_weights_of_the_folder_come_back_into_the_model_that_was_asked_for(tmp_path: Path) -> None:
    engine = NativeEngine(save_tiny_model("llama", tmp_path), override_config={"num_hidden_layers": 1})
    rows = prompts(3)
    before = tokens(engine.generate(requests(rows, GREEDY)))
    engine.sleep()
    engine.wake()
    assert tokens(engine.generate(requests(rows, GREEDY))) == before


def test_sleep_frees_the_cache_and_wake_goes_on(tmp_path: Path) -> None:
    engine = NativeEngine(save_tiny_model("llama", tmp_path, tokenizer=False))
    old, new = tiny_model("llama"), tiny_model("llama", seed=1)
    rows = prompts(3)
    engine.generate(requests(rows, GREEDY))
    assert engine.health().kv_cache_bytes > 0
    engine.sleep()
    assert engine.health().kv_cache_bytes == 0
    assert sum(p.numel() for p in engine._model.parameters()) == 0
    assert engine.health().asleep == {"weights", "kv_cache"}
    with pytest.raises(EngineError, match="asleep"):
        engine.generate(requests(rows, GREEDY))
    with pytest.raises(EngineError, match=r"wake\(\['weights'\]\)"):
        engine.update_weights(weights(new), 1)
    engine.wake()
    assert tokens(engine.generate(requests(rows, GREEDY))) == greedy_of(old, rows)

    engine.update_weights(weights(new), 1)
    engine.sleep()
    engine.wake(["weights"])
    with pytest.raises(EngineError, match="kv_cache are asleep"):
        engine.generate(requests(rows, GREEDY))
    engine.wake(["kv_cache"])
    with pytest.raises(EngineError, match="dropped by sleep"):
        engine.generate(requests(rows, GREEDY))
    engine.update_weights(weights(new), 2)
    assert tokens(engine.generate(requests(rows, GREEDY))) == greedy_of(new, rows)
    with pytest.raises(ValueError, match="unknown memory tag 'disk'"):
        engine.sleep(["disk"])  # pyrefly: ignore


def test_sleep_of_the_cache_while_paused_keeps_the_requests() -> None:
    model = tiny_model("llama")
    engine = NativeEngine(model)
    rows = prompts(2, seed=4)
    long = SamplingParams(temperature=0, max_new_tokens=150, ignore_eos=True)
    running = on_thread(engine.generate, requests(rows, long))
    wait_until(lambda: engine.stats.decode_steps >= 3, "the first steps")
    with pytest.raises(EngineError, match="finish, abort or pause"):
        engine.sleep(["kv_cache"])
    engine.pause()
    engine.sleep(["kv_cache"])
    assert engine.health().kv_cache_bytes == 0
    engine.wake(["kv_cache"])
    engine.continue_()
    found = tokens(running.result(60))
    assert found == [transformers_greedy(model, row, 150, guess) for row, guess in zip(rows, found, strict=True)]


def test_requests_sleep_while_the_trainer_works_and_go_on_with_exact_log_probs() -> None:
    """Partial rollouts on the trainer's device: pause, sleep, new weights, wake, and again."""
    model = tiny_model("llama")
    models = {0: copy.deepcopy(model)}
    engine = NativeEngine(model, max_num_seqs=4)
    rows = prompts(6, seed=7)
    sampling = SamplingParams(n=2, max_new_tokens=40, ignore_eos=True)
    results: list[GenerationResult] = []
    with engine.open_stream() as stream:
        stream.submit(*requests(rows, sampling))
        for version in (1, 2, 3):
            target = engine.stats.decode_tokens + 60
            engine.wait(lambda target=target: engine.stats.decode_tokens >= target)
            engine.pause()
            engine.sleep(["kv_cache"])
            assert engine.health().kv_cache_bytes == 0
            running = {(part.request_id, part.sample_index): part.token_ids for part in stream.partial()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            models[version] = copy.deepcopy(model)
            engine.wake(["kv_cache"])
            engine.update_weights(None, version)
            assert running == {(part.request_id, part.sample_index): part.token_ids for part in stream.partial()}
            engine.continue_()
        results = stream.drain()
    assert {v for r in results for v in r.weight_versions} == {0, 1, 2, 3}
    for r in results:
        assert len(r.token_ids) == 40
        row = rows[int(r.request_id[1:])]
        exact = {version: plain_log_probs(models[version], row, r.token_ids) for version in set(r.weight_versions)}
        wanted = torch.stack([exact[version][place] for place, version in enumerate(r.weight_versions)])
        assert torch.tensor(r.log_probs) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_log_probs_after_an_update_are_those_of_the_weights_unless_the_cache_is_kept(
    kv_on_update: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("qwen3")
    engine = NativeEngine(model, max_num_seqs=3, kv_on_update=kv_on_update)
    assert ("log-probs are then not those of the weights" in caplog.text) == (kv_on_update == "keep")
    rows = prompts(2, seed=8, shortest=20)
    with engine.open_stream() as stream:
        stream.submit(*requests(rows, SamplingParams(n=2, max_new_tokens=30, ignore_eos=True)))
        engine.wait(lambda: engine.stats.decode_tokens >= 24)
        prefilled = engine.stats.prefill_tokens
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
        engine.update_weights(None, 1)
        results = stream.drain()
    gaps = {True: [], False: []}
    for r in results:
        exact = plain_log_probs(model, rows[int(r.request_id[1:])], r.token_ids)
        new = [place for place, version in enumerate(r.weight_versions) if version == 1]
        gaps[0 in r.weight_versions].append((torch.tensor(r.log_probs) - exact)[new].abs().mean())
    assert torch.stack(gaps[False]).max() <= 1e-5, "a sample that had no slot at the update read the old cache"
    if kv_on_update == "recompute":
        assert torch.stack(gaps[True]).max() <= 1e-5
    else:
        assert torch.stack(gaps[True]).min() > 1e-3
        # Only the last sample's prompt is prefilled, by the new weights.
        assert engine.stats.prefill_tokens == prefilled + len(rows[1]) - 1


def test_shared_weights_are_read_in_place_and_the_trainers_module_is_left_alone() -> None:
    model, new = tiny_model("llama_tied"), tiny_model("llama_tied", seed=1)
    model.train()
    attention, forward = model.config._attn_implementation, model.forward
    engine = NativeEngine(model)
    mine = dict(engine._model.named_parameters())
    assert all(mine[name] is parameter for name, parameter in model.named_parameters())
    rows = prompts(3)
    assert tokens(engine.generate(requests(rows, GREEDY))) == greedy_of(tiny_model("llama_tied"), rows)
    assert (model.config._attn_implementation, model.forward, model.training) == (attention, forward, True)
    with torch.no_grad():
        for parameter, changed in zip(model.parameters(), new.parameters(), strict=True):
            parameter.copy_(changed)
    engine.update_weights(None, version=1)
    assert tokens(engine.generate(requests(rows, GREEDY))) == greedy_of(new, rows)
    engine.update_weights(weights(model), version=2)
    with pytest.raises(WeightUpdateError, match="not the memory this engine shares"):
        engine.update_weights(weights(new), version=3)
    loss = model(torch.tensor([rows[0] + [4]]), labels=torch.tensor([rows[0] + [4]])).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_module_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(TypeError, match="not of Linear"):
        NativeEngine(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="sharing cannot convert"):
        NativeEngine(tiny_model("llama"), dtype=torch.bfloat16)


def test_a_closed_engine_ends_its_requests_and_says_so() -> None:
    engine = NativeEngine(tiny_model("llama"))
    running = on_thread(engine.generate, requests([[5]], SamplingParams(max_new_tokens=500, ignore_eos=True)))
    wait_until(lambda: engine.stats.decode_steps >= 2, "the first steps")
    engine.close()
    assert running.result(60)[0].finish_reason == "abort"
    engine.close()
    assert engine.health().reason == "the engine is closed"
    with pytest.raises(EngineError, match="closed"):
        engine.generate(requests([[5]], GREEDY))
