"""A real SGLang server as one of `rollout.server_urls`: it follows the trainer, also in the middle of a generation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.rollout.base import GenerationRequest, GenerationResult, SamplingParams, WeightUpdateError
from dovetail.rollout.remote.engine import RemoteRollout
from dovetail.rollout.sglang import SGLangRollout
from tests.models.tiny import tiny_model
from tests.rollout_sglang.conftest import needs_sglang
from tests.rollout_vllm.reference import greedy, log_probs, mean_gap
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.xdist_group("sglang"), needs_sglang]

EOS = 2
PROMPT = list(range(3, 203))
PROMPTS = [PROMPT, [5, 6, 7, 8], [17] * 40]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)


@pytest.fixture
def url(engine: SGLangRollout) -> Iterator[str]:
    """Of one of the servers that these tests share; their engine gives it weights again afterwards."""
    yield next(iter(engine.servers))
    engine.update_weights(tiny_model("llama_tied").named_parameters(), 0)


def _has_written(engine: RemoteRollout) -> bool:
    """SGLang tells how many tokens a call has written only when it is paused; then the call begins again."""
    engine.pause()
    written = any(sample.token_ids for sample in engine._calls.live)
    engine.continue_()
    return written


@pytest.mark.parametrize("path", ["disk", "gloo broadcast"])
def test_an_sglang_server_follows_the_trainer_also_in_mid_generation(
    url: str, tiny_folder: Path, path: str, tmp_path: Path
) -> None:
    weights = str(tmp_path) if path == "disk" else None
    old, new = tiny_model("llama_tied", seed=1), tiny_model("llama_tied", seed=2)
    settings: Any = {"dialect": "sglang", "weights_folder": weights, "bucket_bytes": 1 << 17}
    with RemoteRollout([url], str(tiny_folder), **settings) as engine:
        engine.update_weights(old.named_parameters(), 4)
        results = engine.generate([GenerationRequest(str(n), prompt, GREEDY) for n, prompt in enumerate(PROMPTS)])
        assert [result.token_ids for result in results] == [greedy(old, prompt, 12) for prompt in PROMPTS]
        plain = results[0].token_ids
        for ignore_eos in (True, False):  # SGLang alone would overlook the stop token of the first
            stop = SamplingParams(max_new_tokens=12, temperature=0, stop_token_ids=(plain[4],), ignore_eos=ignore_eos)
            (stopped,) = engine.generate([GenerationRequest(f"stop-{ignore_eos}", PROMPT, stop)])
            ends = {plain[4]} if ignore_eos else {plain[4], EOS}
            assert stopped.token_ids == plain[: next(at for at, token in enumerate(plain) if token in ends) + 1]
            assert len(stopped.log_probs) == len(stopped.token_ids)
            assert stopped.finish_reason == "stop"
        cut = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, max_new_tokens=16, n=2, ignore_eos=True)
        for result in engine.generate([GenerationRequest("cut", PROMPT, cut)]):
            assert mean_gap(log_probs(old, PROMPT, result.token_ids, 0.7), result.log_probs) <= 1e-5

        running: list[GenerationResult] = []
        request = GenerationRequest("long", PROMPT, LONG)
        thread = threading.Thread(target=lambda: running.extend(engine.generate([request])))
        thread.start()
        wait_until(lambda: _has_written(engine), "tokens of the request", longest_pause=10)
        engine.update_weights(new.named_parameters(), 5)
        thread.join(120)
        (result,) = running
        count = result.weight_versions.count(4)
        assert 0 < count < 200, "the update must meet a running request"
        assert result.weight_versions == [4] * count + [5] * (200 - count)
        head, tail = PROMPT + result.token_ids[:count], result.token_ids[count:]
        assert result.token_ids[:count] == greedy(old, PROMPT, count, result.token_ids)
        assert tail == greedy(new, head, 200 - count, tail)

        short = [item for item in new.named_parameters() if item[0] != "model.norm.weight"]
        with pytest.raises(WeightUpdateError, match=r"no tensor was given for model\.norm\.weight"):
            engine.update_weights(short, 6)
