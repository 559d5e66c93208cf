"""After an update, by whatever path, SGLang is the new model; what does not fit is named, and SGLang survives it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dovetail.rollout.base import EngineError, GenerationRequest, SamplingParams, WeightUpdateError
from dovetail.rollout.remote.weights import save_tensors
from dovetail.rollout.sglang import SGLangRollout
from dovetail.weight_sync import BroadcastFailedError, WeightSender, shared_memory_buckets
from tests.checksums import weight_checksum
from tests.models.tiny import tiny_model
from tests.rollout_sglang.conftest import needs_sglang
from tests.rollout_vllm.reference import greedy, log_probs, mean_gap

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.xdist_group("sglang"), needs_sglang]

PROMPT = list(range(3, 290))
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)


def _tensors(engine: SGLangRollout, model: Any, version: int, folder: Path) -> None:
    engine.update_weights(model.named_parameters(), version)


def _sender(engine: SGLangRollout, model: Any, version: int, folder: Path) -> None:
    """A trainer that owns the group."""
    sender = WeightSender(engine.num_weight_ranks, timeout_s=120)
    thread = threading.Thread(target=sender.send, args=(model.named_parameters(), 1 << 18))
    thread.start()
    engine.join_weight_group(sender.address)
    engine.receive_weights(version)
    thread.join(60)
    assert not thread.is_alive()


PATHS: dict[str, Callable[[SGLangRollout, Any, int, Path], None]] = {
    "tensors": _tensors,
    "a sender's group": _sender,
}


@pytest.mark.parametrize("path", PATHS)
def test_after_an_update_the_engine_is_the_new_model(engine: SGLangRollout, path: str, tmp_path: Path) -> None:
    version = 20 + len(path)
    before = engine.generate([GenerationRequest("a", PROMPT, GREEDY)])[0] if engine.health().ok else None
    new = tiny_model("llama_tied", seed=version)
    PATHS[path](engine, new, version, tmp_path)
    after = engine.generate([GenerationRequest(str(n), PROMPT, GREEDY) for n in range(4)])
    assert [result.token_ids for result in after] == [greedy(new, PROMPT, 12)] * 4
    assert before is None or after[0].token_ids != before.token_ids
    assert after[0].weight_versions == [version] * 12
    assert mean_gap(log_probs(new, PROMPT, after[0].token_ids), after[0].log_probs) <= 1e-5
    assert engine.health().weight_version == version
    names = ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    assert engine.weight_checksums(names) == weight_checksum(new.named_parameters(), names)


def test_the_prompt_of_these_tests_really_sits_in_the_radix_cache(engine: SGLangRollout) -> None:
    old, new = tiny_model("llama_tied"), tiny_model("llama_tied", seed=1)
    engine.update_weights(old.named_parameters(), 0)
    engine.generate([GenerationRequest("a", PROMPT, GREEDY)])
    for path in shared_memory_buckets(new.named_parameters(), save=save_tensors):  # leaves the caches alone
        for server in engine.servers:
            engine._loop.run(engine._sglang.load_file(server, path))
    stale = engine.generate([GenerationRequest("a", PROMPT, GREEDY)])[0]
    assert mean_gap(log_probs(new, PROMPT, stale.token_ids), stale.log_probs) > 0.01


def test_weights_of_somebody_else_are_noticed(engine: SGLangRollout) -> None:
    model = tiny_model("llama_tied")
    engine.update_weights(model.named_parameters(), 4)
    for server in engine.servers:
        engine._loop.run(engine._sglang._name_version(server, "theirs"))
    with pytest.raises(EngineError, match="not version 4"):
        engine.generate([GenerationRequest("a", PROMPT, GREEDY)])
    engine.update_weights(model.named_parameters(), 5)


def test_missing_misshapen_and_unknown_tensors_are_named_and_the_engine_waits_for_a_whole_update(
    engine: SGLangRollout,
) -> None:
    model = tiny_model("llama_tied", seed=2)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    short = {name: tensor for name, tensor in weights.items() if name != "model.layers.1.self_attn.k_proj.weight"}
    with pytest.raises(WeightUpdateError, match=r"no tensor was given for model\.layers\.1\.self_attn\.k_proj\.weight"):
        engine.update_weights(short.items(), 5)
    with pytest.raises(EngineError, match="version 5 did not finish"):
        engine.generate([GenerationRequest("a", PROMPT, GREEDY)])
    assert not engine.health().ok
    bent = weights | {"model.norm.weight": weights["model.norm.weight"][:7]}
    misfit = r"'model\.norm\.weight' has shape \(7,\).*\(128,\)"
    with pytest.raises(WeightUpdateError, match=misfit):
        engine.update_weights(bent.items(), 5)
    with pytest.raises(WeightUpdateError, match=r"no tensor 'model\.extra'"):
        engine.update_weights([*weights.items(), ("model.extra", weights["model.norm.weight"])], 5)
    engine.update_weights(weights.items(), 6)
    assert engine.generate([GenerationRequest("a", PROMPT, GREEDY)])[0].token_ids == greedy(model, PROMPT, 12)


def test_a_senders_update_that_does_not_fit_is_named_and_the_sender_waits_for_nobody(engine: SGLangRollout) -> None:
    model = tiny_model("llama_tied", seed=8)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    bent = weights | {"model.layers.1.mlp.up_proj.weight": weights["model.layers.1.mlp.up_proj.weight"][:7]}
    sender = WeightSender(engine.num_weight_ranks, timeout_s=120)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(engine.join_weight_group, sender.address)
        sender.connect()
        joining.result()
        failing = pool.submit(sender.send, _failing(weights), 1 << 18)
        with pytest.raises(BroadcastFailedError, match="the disk is full"):
            engine.receive_weights(8)
        assert isinstance(failing.exception(), OSError)
        sending = pool.submit(sender.send, bent.items(), 1 << 18)
        with pytest.raises(WeightUpdateError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' has shape \(7, 128\)"):
            engine.receive_weights(8)
        assert isinstance(sending.exception(timeout=20), RuntimeError)
    with pytest.raises(EngineError, match="call join_weight_group"):
        engine.receive_weights(8)
    _sender(engine, model, 9, Path())
    assert engine.generate([GenerationRequest("a", PROMPT, GREEDY)])[0].token_ids == greedy(model, PROMPT, 12)


def _failing(weights: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, tensor in weights.items():
        if name.startswith("model.layers.1"):
            raise OSError("the disk is full")
        yield name, tensor


def test_a_tied_tensor_counts_under_either_name(engine: SGLangRollout) -> None:
    model = tiny_model("llama_tied", seed=3)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    engine.update_weights(weights.items(), 7)
    assert engine.generate([GenerationRequest("a", PROMPT, GREEDY)])[0].token_ids == greedy(model, PROMPT, 12)


def test_every_tensor_of_the_source_is_taken_even_after_a_misfit(engine: SGLangRollout) -> None:
    model = tiny_model("llama_tied")
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
