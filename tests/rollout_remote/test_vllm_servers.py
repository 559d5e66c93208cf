"""Real vLLM servers driven over HTTP, float32, against plain transformers."""

from __future__ import annotations

import json
import logging
import urllib.request
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.backends.build import build_backend
from dovetail.config.fsdp import FSDPConfig, MixedPrecisionConfig
from dovetail.models.policy import PolicyModel
from dovetail.rollout.base import EngineError, GenerationRequest, GenerationResult, SamplingParams, WeightUpdateError
from dovetail.rollout.remote.engine import RemoteRollout
from tests.checksums import weight_checksum
from tests.models.tiny import save_tiny_model, tiny_model
from tests.ranks import run_ranks
from tests.rollout.stalling import check_stalls
from tests.rollout_remote.conftest import FAMILY
from tests.rollout_remote.servers import VLLMServer
from tests.rollout_vllm.reference import check_misfits, greedy, log_probs, mean_gap
from tests.rollout_vllm.running import generating
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.xdist_group("vllm-servers")]

# Longer than one block of the KV cache, so that its beginning is in the prefix cache.
PROMPT = list(range(3, 203))
PROMPTS = [[5, 6, 7, 8], [250, 9], PROMPT, [17] * 40, [9, 9], [30, 31, 32]]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_new_tokens=300, ignore_eos=True)
FP32 = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="float32"))


def _engine(servers: list[VLLMServer], folder: Path, **options: Any) -> RemoteRollout:
    return RemoteRollout([server.url for server in servers], str(folder), bucket_bytes=1 << 16, **options)


def _requests(prompts: list[list[int]], sampling: SamplingParams) -> list[GenerationRequest]:
    return [GenerationRequest(f"r{number}", prompt, sampling) for number, prompt in enumerate(prompts)]


def _tokens_written(server: VLLMServer) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def _running(
    engine: RemoteRollout, requests: list[GenerationRequest], server: VLLMServer, count: int
) -> Future[list[GenerationResult]]:
    """Start them on a thread; come back when the server has written `count` tokens. They are counted from before the
    start: on a busy machine most may be there before this thread looks."""
    start = _tokens_written(server)
    running = generating(engine, *requests)
    wait_until(lambda: _tokens_written(server) - start >= count, f"{count} tokens of {server.url}")
    return running


def test_greedy_tokens_and_log_probs_equal_those_of_transformers_and_both_servers_work(
    servers: list[VLLMServer], folder: Path, tmp_path: Path
) -> None:
    model = tiny_model(FAMILY)
    with _engine(servers, folder, weights_folder=str(tmp_path)) as engine:
        engine.update_weights(model.named_parameters(), 1)
        before = [_tokens_written(server) for server in servers]
        results = engine.generate(_requests(PROMPTS, GREEDY))
        assert [result.token_ids for result in results] == [greedy(model, prompt, 12) for prompt in PROMPTS]
        assert {result.finish_reason for result in results} == {"length"}
        assert all(_tokens_written(server) > count for server, count in zip(servers, before, strict=True))
        cut = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, max_new_tokens=16, n=3, seed=5, ignore_eos=True)
        for result in engine.generate(_requests(PROMPTS, cut)):
            prompt = PROMPTS[int(result.request_id[1:])]
            assert mean_gap(log_probs(model, prompt, result.token_ids, 0.7), result.log_probs) <= 1e-5


def test_a_seed_fixes_the_tokens_on_whatever_server(servers: list[VLLMServer], folder: Path) -> None:
    sampling = SamplingParams(max_new_tokens=16, n=2, seed=7, ignore_eos=True)
    with _engine(servers[:1], folder) as first, _engine(servers[1:], folder) as second:
        model = tiny_model(FAMILY)
        for engine in (first, second):
            engine.update_weights(model.named_parameters(), 1)
        together = first.generate(_requests(PROMPTS, sampling))
        alone = second.generate([GenerationRequest("r0", PROMPTS[0], sampling)])
    assert [result.token_ids for result in together[:2]] == [result.token_ids for result in alone]
    assert alone[0].token_ids != alone[1].token_ids
    assert [(result.request_id, result.sample_index) for result in together[:3]] == [("r0", 0), ("r0", 1), ("r1", 0)]


def test_stop_tokens_are_kept_and_the_models_own_can_be_ignored(servers: list[VLLMServer], folder: Path) -> None:
    model = tiny_model(FAMILY)
    with _engine(servers[:1], folder) as engine:
        engine.update_weights(model.named_parameters(), 1)
        tokens = greedy(model, PROMPTS[0], 12)
        sampling = SamplingParams(temperature=0, max_new_tokens=12, stop_token_ids=(tokens[4],), ignore_eos=True)
        (result,) = engine.generate([GenerationRequest("a", PROMPTS[0], sampling)])
        assert result.token_ids == tokens[: tokens.index(tokens[4]) + 1]
        assert result.finish_reason == "stop"
        many = SamplingParams(max_new_tokens=200, n=12, seed=0, temperature=2.0)
        stopped = engine.generate([GenerationRequest("b", [7], many)])
        assert any(result.finish_reason == "stop" and result.token_ids[-1] == 2 for result in stopped)
        (result,) = engine.generate([GenerationRequest("c", [7] * 505, LONG)])
        assert (len(result.token_ids), result.finish_reason) == (7, "length")


@pytest.mark.parametrize("path", ["disk", "gloo broadcast"])
def test_after_an_update_every_server_is_the_new_model(
    servers: list[VLLMServer], folder: Path, path: str, tmp_path: Path
) -> None:
    old, new = tiny_model(FAMILY), tiny_model(FAMILY, seed=1)
    with _engine(servers, folder, weights_folder=str(tmp_path) if path == "disk" else None) as engine:
        engine.update_weights(old.named_parameters(), 4)
        before = engine.generate(_requests([PROMPT] * 4, GREEDY))
        assert [result.token_ids for result in before] == [greedy(old, PROMPT, 12)] * 4
        engine.update_weights(new.named_parameters(), 5)
        after = engine.generate(_requests([PROMPT] * 4, GREEDY))
        assert [result.token_ids for result in after] == [greedy(new, PROMPT, 12)] * 4
        assert after[0].token_ids != before[0].token_ids
        assert {tuple(result.weight_versions) for result in after} == {(5,) * 12}
        for result in after:
            assert mean_gap(log_probs(new, PROMPT, result.token_ids), result.log_probs) <= 1e-5
        names = [name for name, _ in new.named_parameters()]
        held = engine.weight_checksums(names)
        assert {name: held[name] for name in names} == weight_checksum(new.named_parameters())


@torch.no_grad()
def _change(parameters: Any) -> None:
    for parameter in parameters:
        parameter.mul_(1.05).add_(0.003)


def _trainer_of_two(rank: int, world_size: int, urls: list[str], folder: str, weights: str | None) -> list[list[int]]:
    backend = build_backend(
        "fsdp2", PolicyModel(tiny_model(FAMILY), use_remove_padding=False, use_fused_kernels=False), fsdp=FP32
    )
    _change(backend.module.parameters())
    with RemoteRollout(urls, folder, bucket_bytes=1 << 16, weights_folder=weights) as engine:
        engine.update_weights(backend.named_weights(), 6)
        # The second rank still generates when the first wants to update again.
        results = engine.generate(_requests([[*PROMPT, 5 + rank]] * 2, LONG if rank else GREEDY))
        assert {version for result in results for version in result.weight_versions} == {6}
        # Missing on the rank that sends: told on every rank, and none of them hangs in a gather.
        short = ((name, tensor) for name, tensor in backend.named_weights() if name != "model.norm.weight")
        with pytest.raises((WeightUpdateError, EngineError), match=r"no tensor was given for model\.norm\.weight"):
            engine.update_weights(short, 7)
        return [result.token_ids for result in results]


@pytest.mark.parametrize("path", ["disk", "gloo broadcast"])
def test_two_fsdp2_ranks_share_the_servers_and_the_first_feeds_them(
    servers: list[VLLMServer], folder: Path, path: str, tmp_path: Path
) -> None:
    urls = [server.url for server in servers]
    weights = str(tmp_path) if path == "disk" else None
    results = run_ranks(_trainer_of_two, 2, urls, str(folder), weights, timeout=240)
    model = tiny_model(FAMILY)
    _change(model.parameters())
    for rank in range(2):
        found = results[rank]
        assert found == [greedy(model, [*PROMPT, 5 + rank], 300 if rank else 12, found[0])] * 2


@pytest.mark.parametrize("paused_first", [True, False])
def test_an_update_in_the_middle_of_a_generation_continues_under_the_new_weights(
    servers: list[VLLMServer], folder: Path, paused_first: bool
) -> None:
    old, new = tiny_model(FAMILY), tiny_model(FAMILY, seed=5)
    requests = [GenerationRequest("long", PROMPT, LONG), GenerationRequest("other", [7], LONG)]
    with _engine(servers[:1], folder) as engine:
        for before in range(1, 11, 2):
            engine.update_weights(old.named_parameters(), before)
            start = _tokens_written(servers[0])
            running = _running(engine, requests, servers[0], 40)
            if paused_first:
                engine.pause()
                health, written = engine.health(), [_tokens_written(servers[0]) - start for _ in range(20)]
            engine.update_weights(new.named_parameters(), before + 1)
            if paused_first:
                engine.continue_()
            results = running.result(120)
            num_old = written[0] if paused_first else sum(result.weight_versions.count(before) for result in results)
            if num_old < 0.9 * 2 * 300:  # else it came too late, as on a busy machine, and shows nothing
                break
        if paused_first:
            num_unfinished = sum(result.weight_versions.count(before) < 300 for result in results)
            assert (health.paused, health.num_running, health.num_waiting) == (True, 0, num_unfinished)
            assert written == written[:1] * 20
        assert any(0 < result.weight_versions.count(before) < 300 for result in results)
        for result, prompt in zip(results, (PROMPT, [7]), strict=True):
            count = result.weight_versions.count(before)
            assert result.weight_versions == [before] * count + [before + 1] * (300 - count)
            assert result.token_ids[:count] == greedy(old, prompt, count, result.token_ids)
            head, tail = prompt + result.token_ids[:count], result.token_ids[count:]
            assert tail == greedy(new, head, 300 - count, tail)
            assert mean_gap(log_probs(new, head, tail), result.log_probs[count:]) <= 1e-5


def test_a_pause_alone_changes_no_greedy_token(servers: list[VLLMServer], folder: Path) -> None:
    model = tiny_model(FAMILY)
    with _engine(servers, folder) as engine:
        engine.update_weights(model.named_parameters(), 1)
        for _ in range(5):
            start = sum(map(_tokens_written, servers))
            running = _running(engine, _requests([PROMPT, [7], [8, 9]], LONG), servers[0], 10)
            met: list[tuple[float, int]] = []
            for _ in range(3):
                engine.pause()
                before = sum(map(_tokens_written, servers))
                met.append((before - start, engine.health().num_waiting))
                engine.continue_()
                # On a busy machine the servers may be done before this process comes to the next pause.
                wait_until(
                    lambda end=before: sum(map(_tokens_written, servers)) > end or not engine.health().num_running,
                    "another token, or the end",
                )
            results = running.result(120)
            num_written, num_waiting = met[0]
            if num_written < 0.9 * 3 * 300:  # else already the first pause came too late and shows nothing
                break
        assert num_waiting > 0, "a pause must meet a running request"
        for result, prompt in zip(results, (PROMPT, [7], [8, 9]), strict=True):
            assert result.token_ids == greedy(model, prompt, 300, result.token_ids)


def test_abort_ends_one_request_and_keeps_what_it_wrote(servers: list[VLLMServer], folder: Path) -> None:
    model = tiny_model(FAMILY)
    with _engine(servers[:1], folder) as engine:
        engine.update_weights(model.named_parameters(), 1)
        for _ in range(5):
            requests = [GenerationRequest("cut", [7], LONG), GenerationRequest("kept", [8], LONG)]
            others = GenerationRequest("others", [9], replace(LONG, n=30))  # keep the server busy; all run at once
            start = _tokens_written(servers[0])
            running = _running(engine, [*requests, others], servers[0], 40)
            num_met = engine.abort(["cut"])
            written = _tokens_written(servers[0]) - start
            cut, kept, *_ = running.result(120)
            if written < 0.9 * 32 * 300:  # else it came too late, as on a busy machine, and shows nothing
                break
        assert (num_met, cut.finish_reason) == (1, "abort")
        assert 0 < len(cut.token_ids) < 300
        assert cut.token_ids == greedy(model, [7], len(cut.token_ids), cut.token_ids)
        assert kept.token_ids == greedy(model, [8], 300, kept.token_ids)
        assert engine.health().num_running == 0


@pytest.mark.parametrize("path", ["disk", "gloo broadcast"])
def test_misfits_are_named_and_the_engine_waits_for_a_whole_update(
    servers: list[VLLMServer], folder: Path, path: str, tmp_path: Path
) -> None:
    with _engine(servers, folder, weights_folder=str(tmp_path) if path == "disk" else None) as engine:
        check_misfits(engine, tiny_model(FAMILY, seed=2), PROMPT)


def test_a_source_that_fails_leaves_the_servers_ready_for_the_next_update(
    servers: list[VLLMServer], folder: Path
) -> None:
    model = tiny_model(FAMILY, seed=2)

    def source() -> Any:
        yield from list(model.named_parameters())[:3]
        raise OSError("the trainer lost its disk")

    with _engine(servers, folder) as engine:
        with pytest.raises((OSError, EngineError, WeightUpdateError), match="the trainer lost its disk"):
            engine.update_weights(source(), 5)
        engine.update_weights(model.named_parameters(), 6)
        assert engine.generate(_requests([PROMPT], GREEDY))[0].token_ids == greedy(model, PROMPT, 12)


def test_a_sleeping_engine_refuses_work_until_it_has_weights_again(servers: list[VLLMServer], folder: Path) -> None:
    model = tiny_model(FAMILY)
    with _engine(servers, folder) as engine:
        engine.update_weights(model.named_parameters(), 1)
        engine.sleep()
        with pytest.raises(EngineError, match="asleep"):
            engine.generate(_requests([PROMPT], GREEDY))
        with pytest.raises(EngineError, match=r"wake\(\['weights'\]\)"):
            engine.update_weights(model.named_parameters(), 2)
        engine.wake(["weights"])
        engine.update_weights(model.named_parameters(), 2)
        engine.wake(["kv_cache"])
        (result,) = engine.generate(_requests([PROMPT], GREEDY))
        assert result.token_ids == greedy(model, PROMPT, 12)
        assert result.weight_versions == [2] * 12


def _forget(server: VLLMServer) -> None:
    """What a server that was started again looks like: weights of no version that the trainer sent."""
    body = json.dumps({"method": "dovetail_set_version", "args": [None]}).encode()
    call = urllib.request.Request(f"{server.url}/collective_rpc", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(call, timeout=60).close()


def test_a_server_that_forgot_its_weights_writes_nothing_until_it_has_them_again(
    servers: list[VLLMServer], folder: Path, tmp_path: Path
) -> None:
    model = tiny_model(FAMILY, seed=3)
    with _engine(servers, folder, weights_folder=str(tmp_path)) as engine:
        engine.update_weights(model.named_parameters(), 8)
        _forget(servers[0])
        before = _tokens_written(servers[0])
        results = engine.generate(_requests([[5 + number] for number in range(6)], GREEDY))
        assert [result.token_ids for result in results] == [greedy(model, [5 + number], 12) for number in range(6)]
        assert _tokens_written(servers[0]) == before
        # It is read from the folder at the next look at the servers.
        wait_until(lambda: engine.health().reason == "", "the server to have weights again")
        assert len(engine.weight_checksums(["model.norm.weight"])) > 0
        # New names: those of before stay with the server that has their prefix.
        engine.generate([GenerationRequest(f"new {number}", [5 + number], GREEDY) for number in range(6)])
        assert _tokens_written(servers[0]) > before
    with _engine(servers, folder) as engine:  # without a folder the trainer sends them again
        engine.update_weights(model.named_parameters(), 9)
        for server in servers:
            _forget(server)
        engine.reload_weights = lambda fresh: fresh.update_weights(model.named_parameters(), 9)
        assert engine.generate(_requests([PROMPT], GREEDY))[0].token_ids == greedy(model, PROMPT, 12)


def test_another_model_is_refused_at_the_start_and_says_what_differs(
    servers: list[VLLMServer], folder: Path, tmp_path: Path
) -> None:
    other = save_tiny_model(FAMILY, tmp_path / "other", vocab_size=352, intermediate_size=192)
    with pytest.raises(EngineError, match=r"another model.*vocab_size=320 there, 352 here; intermediate_size=160"):
        _engine(servers, other)
    with _engine(servers[:1], folder) as engine, pytest.raises(ValueError, match="vocabulary is 0 to 319"):
        engine.generate([GenerationRequest("odd", [320])])


@pytest.mark.kills
def test_a_server_killed_in_mid_batch_is_reported_and_its_requests_are_finished_by_the_other(
    servers: list[VLLMServer], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(FAMILY, seed=6)
    with _engine(servers, folder, weights_folder=str(tmp_path)) as engine, caplog.at_level(logging.WARNING):
        engine.update_weights(model.named_parameters(), 11)
        requests = [GenerationRequest(f"short {n}", [*PROMPT, 5 + n], GREEDY) for n in range(6)]
        requests += [GenerationRequest(f"long {n}", [*PROMPT, 9 + n], LONG) for n in range(6)]
        running = _running(engine, requests, servers[1], 60)
        servers[1].kill()
        wait_until(lambda: servers[1].url in engine.health().reason, "a word of the death")
        results = running.result(240)
        assert [result.request_id for result in results] == [request.request_id for request in requests]
        for request, result in zip(requests, results, strict=True):
            prompt, count = list(request.prompt_token_ids), request.sampling.max_new_tokens
            assert result.token_ids == greedy(model, prompt, count, result.token_ids)
        assert {version for result in results for version in result.weight_versions} == {11}
        assert engine.health().ok
        assert any(servers[1].url in message and "move on" in message for message in caplog.messages)
        # The next update goes to whoever is left.
        fresh = tiny_model(FAMILY, seed=7)
        engine.update_weights(fresh.named_parameters(), 12)
        assert engine.generate(_requests([PROMPT], GREEDY))[0].token_ids == greedy(fresh, PROMPT, 12)
        # And when the last one dies, the error names it.
        running = _running(engine, [GenerationRequest("lost", PROMPT, LONG)], servers[0], 10)
        servers[0].kill()
        with pytest.raises(EngineError, match=f"none of 2 servers is up.*{servers[0].url}"):
            running.result(60)
        assert not engine.health().ok
        with pytest.raises(EngineError, match="no server answers"):
            engine.update_weights(model.named_parameters(), 13)


def test_a_response_longer_than_a_stall_is_progress_and_a_server_that_hangs_is_a_stall(
    servers: list[VLLMServer], folder: Path, tmp_path: Path
) -> None:
    with _engine(servers, folder) as engine:
        check_stalls(engine, folder, tmp_path, [server.pid for server in servers])
