"""Requests that come and go on real SGLang servers, and weights that change while they run."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from dovetail.rollout.base import GenerationRequest, SamplingParams
from dovetail.rollout.sglang import SGLangRollout
from tests.models.tiny import tiny_model
from tests.rollout.stalling import check_stalls
from tests.rollout_sglang.conftest import needs_sglang
from tests.rollout_vllm.reference import log_probs, mean_gap
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.xdist_group("sglang"), needs_sglang]

LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=8, n=2, ignore_eos=True)


def test_requests_join_and_leave_while_weights_change_and_each_token_is_of_its_version(engine: SGLangRollout) -> None:
    models = {version: tiny_model("llama_tied", seed=version) for version in (61, 62, 63)}
    prompts = {"long": list(range(3, 203)), "cut": [9, 8, 7], "short": [5, 6], "late": [11, 12]}
    engine.update_weights(models[61].named_parameters(), 61)

    def written(name: str) -> int:
        engine.pause()
        count = sum(len(result.token_ids) for result in engine.partial([name]))
        engine.continue_()
        return count

    with engine.open_stream() as stream:
        stream.submit(GenerationRequest("long", prompts["long"], LONG), GenerationRequest("cut", prompts["cut"], LONG))
        wait_until(lambda: written("long") > 0, "tokens of the first version")
        assert stream.abort(["cut"]) == 1
        stream.submit(GenerationRequest("short", prompts["short"], SHORT, sample_index=3, session="a"))
        for version in (62, 63):
            before = written("long")
            engine.stage_weights(models[version].named_parameters(), version)
            assert engine.commit_weights(version) > 0
            wait_until(lambda before=before: written("long") > before, f"tokens of version {version}")
        stream.submit(GenerationRequest("late", prompts["late"], SHORT))
        assert {result.finish_reason for result in stream.partial()} <= {"running"}
        results = stream.drain(timeout=300)
    by_name = {(result.request_id, result.sample_index): result for result in results}
    assert set(by_name) == {("long", 0), ("cut", 0), ("short", 3), ("short", 4), ("late", 0), ("late", 1)}
    assert by_name["cut", 0].finish_reason == "abort"
    assert set(by_name["long", 0].weight_versions) == {61, 62, 63}
    for result in results:
        start = 0
        for version, same in groupby(result.weight_versions):
            end = start + len(list(same))
            head = prompts[result.request_id] + result.token_ids[:start]
            wanted = log_probs(models[version], head, result.token_ids[start:end])
            assert mean_gap(wanted, result.log_probs[start:end]) <= 1e-5
            start = end
        assert start == len(result.token_ids) == len(result.log_probs)


def test_a_response_longer_than_a_stall_is_progress_and_a_server_that_hangs_is_a_stall(
    engine: SGLangRollout, tiny_folder: Path, tmp_path: Path
) -> None:
    check_stalls(engine, tiny_folder, tmp_path, [server.pid for server in engine.servers.values()])
