"""SGLang as servers: shared by a sticky router, killed in the middle of a generation, started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from typing import Any

import psutil
import pytest

from dovetail.controller.rendezvous import LOOPBACK, hold_port
from dovetail.rollout.base import EngineError, GenerationRequest, SamplingParams
from dovetail.rollout.sglang import SGLangRollout
from dovetail.rollout.sglang import engine as sglang_engine
from dovetail.rollout.sglang.server import SGLangServer
from tests.models.tiny import tiny_model
from tests.rollout_sglang.conftest import Running, needs_sglang
from tests.rollout_vllm.reference import greedy
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.xdist_group("sglang"), needs_sglang]

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_new_tokens=160, ignore_eos=True)


@pytest.fixture
def model(engine: SGLangRollout) -> Any:
    model = tiny_model("llama_tied", seed=4)
    # Always: another test may have left other weights under the same version.
    engine.update_weights(model.named_parameters(), 6)
    return model


def _servers(engine: SGLangRollout) -> list[SGLangServer]:
    return list(engine.servers.values())


def _batch(count: int, sampling: SamplingParams) -> list[GenerationRequest]:
    return [GenerationRequest(f"{sampling.max_new_tokens} {n}", [9, 5 + n, 11], sampling) for n in range(count)]


def _wanted(model: Any, requests: list[GenerationRequest]) -> list[list[int]]:
    return [greedy(model, list(r.prompt_token_ids), r.sampling.max_new_tokens) for r in requests]


def test_a_held_port_is_given_to_nobody_but_the_server_that_asks_for_it() -> None:
    with hold_port(LOOPBACK) as holder, socket.socket() as server:
        port = holder.getsockname()[1]
        others = [socket.create_server(("127.0.0.1", 0)) for _ in range(50)]
        assert port not in [other.getsockname()[1] for other in others]
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        for other in others:
            other.close()


def test_both_servers_work_and_the_samples_of_a_request_stay_together(
    engine: SGLangRollout, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[str]] = {}
    complete = engine._sglang.complete

    async def watched(server: str, sample: Any) -> Any:
        seen.setdefault(str(sample.sequence[:3]), set()).add(server)
        return await complete(server, sample)

    monkeypatch.setattr(engine._sglang, "complete", watched)
    requests = _batch(12, SamplingParams(temperature=0, max_new_tokens=8, n=3, ignore_eos=True))
    results = engine.generate(requests)
    assert [result.token_ids for result in results[::3]] == _wanted(model, requests)
    assert {len(servers) for servers in seen.values()} == {1}
    assert len(set.union(*seen.values())) == 2


def test_servers_listen_on_loopback_but_for_the_store_of_torch(engine: SGLangRollout) -> None:
    """torch's TCPStore, which SGLang's processes find each other by, listens everywhere and cannot be told not to."""
    for server in _servers(engine):
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        heard = [one for process in processes for one in process.net_connections() if one.status == "LISTEN"]
        outside = [one.laddr for one in heard if one.laddr.ip not in ("127.0.0.1", "::1")]
        assert {address.port for address in outside} <= {server.store_port}
        assert server.url.removeprefix("http://127.0.0.1:") in [str(one.laddr.port) for one in heard]


@pytest.mark.slow  # the pool that replaces servers is the one of vLLM's, whose servers die in rollout_remote
@pytest.mark.kills
def test_killed_servers_are_replaced_by_others_then_by_new_ones_then_reported(
    engine: SGLangRollout, model: Any
) -> None:
    """One story, because servers are dear to start: one of two dies, then the other, then both with no restart left."""
    _one_dies(engine, model)
    _the_last_one_dies(engine, model)
    _both_die(engine)


def _one_dies(engine: SGLangRollout, model: Any) -> None:
    """What a killed server was writing is written by the other."""
    short, long = _batch(3, GREEDY), _batch(6, LONG)
    requests = [*short, *long]
    running = Running(engine, requests)
    running.paused_after(GREEDY.max_new_tokens + 1, long)  # the short ones are done by then
    engine.continue_()
    os.kill(_servers(engine)[0].pid, signal.SIGKILL)
    results = running.join(300)
    assert [result.request_id for result in results] == [request.request_id for request in requests]
    assert [result.token_ids for result in results] == _wanted(model, requests)
    assert {version for result in results for version in result.weight_versions} == {6}
    assert len(engine.deaths) == 1


def _the_last_one_dies(engine: SGLangRollout, model: Any) -> None:
    """Servers that are all dead are started again with the current weights."""
    short, long = _batch(2, GREEDY), _batch(2, LONG)
    requests = [*short, *long]
    running = Running(engine, requests)
    running.paused_after(GREEDY.max_new_tokens + 1, long)
    engine.restarts_left = 1
    engine.reload_weights = lambda fresh: fresh.update_weights(model.named_parameters(), 6)
    # The scheduler alone: its server notices, and ends. It is looked for first: the responses must not be done by then.
    server = psutil.Process(_servers(engine)[1].pid)
    (scheduler,) = [child for child in server.children() if "scheduler" in " ".join(child.cmdline())]
    engine.continue_()
    scheduler.kill()
    results = running.join(800)
    assert [result.token_ids for result in results] == _wanted(model, requests)
    assert {version for result in results for version in result.weight_versions} == {6}
    assert (engine.restarts_left, engine.deaths) == (0, [])


def _both_die(engine: SGLangRollout) -> None:
    """With no restart left, it is said."""
    running = Running(engine, _batch(4, LONG))
    running.paused_after(1)
    engine.continue_()
    for server in _servers(engine):
        os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="ended with status -9"):
        running.join(60)
    assert not engine.health().ok
    with pytest.raises(EngineError, match="ended with status -9"):
        engine.generate(_batch(1, GREEDY))


@pytest.mark.slow
@pytest.mark.kills
def test_one_server_that_hangs_is_started_again_with_the_weights_while_the_other_writes(
    engine: SGLangRollout, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_engine, "_SILENCE_S", 1.0)
    monkeypatch.setattr(engine._pool, "_silence_s", 1.0)
    engine.restarts_left = 1
    engine.reload_weights = lambda fresh: fresh.update_weights(model.named_parameters(), 6)
    engine.update_weights(model.named_parameters(), 6)
    hangs, batch = _servers(engine)[0], _batch(6, GREEDY)
    before = hangs.pid
    os.killpg(before, signal.SIGSTOP)
    results = engine.generate(batch)
    assert [result.token_ids for result in results] == _wanted(model, batch)
    wait_until(lambda: hangs.url in engine._pool.down(), "the server to be missed")
    results = engine.generate(batch)
    assert [result.token_ids for result in results] == _wanted(model, batch)
    assert {version for result in results for version in result.weight_versions} == {6}
    assert hangs.pid != before
    assert set(engine._pool.up()) == set(engine.servers)
    assert (engine.restarts_left, engine.deaths) == (0, [])


def test_a_server_that_cannot_start_says_why(tiny_folder: Any, tmp_path: Any) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "SGLang 0.4.1 is installed for this test" >&2\nexit 3\n')
    python.chmod(0o755)
    from tests.rollout_sglang.conftest import small_settings

    with pytest.raises(EngineError, match=r"(?s)supports 0\.5\.18 to 0\.5\.23.*SGLang 0\.4\.1 is installed"):
        SGLangRollout(small_settings(tiny_folder), num_servers=1, python=str(python))


def test_a_server_ends_with_whoever_started_it(tmp_path: Any) -> None:
    """Its standard input is a pipe from the starter; serve.py needs no SGLang to notice that it closed."""
    from dovetail.rollout.sglang import serve

    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text(
        "import runpy, threading\n"
        f"names = runpy.run_path({serve.__file__!r})\n"
        "threading.Thread(target=names['_end_with_starter'], daemon=True).start()\n"
        "threading.Event().wait()\n"
    )
    process = subprocess.Popen(
        [os.environ.get("PYTHON", "python3"), str(sleeper)], stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == -signal.SIGKILL
