"""What the engine says to servers that are not what they should be: real HTTP, answers made up."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from aiohttp import web

from dovetail.rollout.base import EngineError, GenerationRequest, SamplingParams, UnsupportedPromptError
from dovetail.rollout.loop_thread import LoopThread
from dovetail.rollout.remote import pool, sglang_dialect, vllm_dialect
from dovetail.rollout.remote.calls import SampleCalls
from dovetail.rollout.remote.client import HttpClient
from dovetail.rollout.remote.engine import RemoteRollout
from dovetail.rollout.remote.pool import ServerPool
from tests.models.tiny import save_tiny_model, tiny_model
from tests.waiting import wait_until

pytestmark = pytest.mark.unit

MODELS = {"data": [{"id": "m", "max_model_len": 64}]}
PLAIN = SamplingParams(max_new_tokens=4, seed=1)


class _Fake:
    """Answers `routes` by "METHOD /path" with a JSON value, a callable of the request's body, or a status; else 404."""

    def __init__(self) -> None:
        self.routes: dict[str, Any] = {"GET /health": {}}
        self.asked: list[tuple[str, Any]] = []
        self._thread = LoopThread("fake server")
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._thread.run(self._serve(listener))

    def close(self) -> None:
        self._thread.run(self._runner.cleanup())
        self._thread.close()

    def bodies(self, route: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == route]

    async def _serve(self, listener: socket.socket) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    async def _answer(self, request: web.Request) -> web.Response:
        route = f"{request.method} {request.path}"
        body = await request.json() if request.can_read_body else None
        self.asked.append((route, body))
        answer = self.routes.get(route, 404)
        if callable(answer):
            answer = answer(body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, int):
            return web.Response(status=answer, text=f"made-up trouble at {request.path}")
        return web.json_response(answer)


@pytest.fixture
def fake() -> Iterator[_Fake]:
    server = _Fake()
    yield server
    server.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama_tied", tmp_path_factory.mktemp("model") / "m")


def _completion(tokens: list[int], reason: str = "length", **fields: Any) -> dict[str, Any]:
    scores = {"token_logprobs": [-0.5] * len(tokens)}
    return {"choices": [{"text": "?", "finish_reason": reason, "logprobs": scores, "token_ids": tokens, **fields}]}


def test_a_wrong_url_is_named_at_the_start(fake: _Fake, folder: Path) -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:1/v1/models: no connection"):
        RemoteRollout(["http://127.0.0.1:1"], str(folder))
    with pytest.raises(EngineError, match=rf"GET {fake.url}/v1/models answered HTTP 404: made-up trouble"):
        RemoteRollout([fake.url], str(folder))
    fake.routes["GET /v1/models"] = {"models": []}
    with pytest.raises(EngineError, match=r"answered in a form not known here \(KeyError: 'data'\): \{'models'"):
        RemoteRollout([fake.url], str(folder))


def test_a_vllm_server_without_the_extension_generates_and_says_how_to_let_it_take_weights(
    fake: _Fake, folder: Path
) -> None:
    fake.routes |= {
        "GET /v1/models": MODELS,
        "POST /v1/completions": _completion([7, 8, 9, 10], token_ids=[7, 8, 9, 10]),
    }
    with RemoteRollout([fake.url], str(folder)) as engine:
        (result,) = engine.generate([GenerationRequest("a", [5, 6], PLAIN)])
        assert (result.token_ids, result.log_probs) == ([7, 8, 9, 10], [-0.5] * 4)
        (body,) = fake.bodies("POST /v1/completions")
        assert (body["prompt"], body["max_tokens"], body["stop_token_ids"]) == ([5, 6], 4, [2])
        with pytest.raises(ValueError, match=r"cannot be had from .* which gives 'raw' log-probs"):
            engine.generate([GenerationRequest("a", [5, 6], SamplingParams(temperature=0.5))])
        with pytest.raises(EngineError, match=r"VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls dovetail\."):
            engine.update_weights(tiny_model("llama_tied").named_parameters(), 1)


def test_an_error_500_of_a_healthy_server_is_raised_with_url_and_answer(fake: _Fake, folder: Path) -> None:
    fake.routes |= {"GET /v1/models": MODELS, "POST /v1/completions": 500}
    with RemoteRollout([fake.url], str(folder)) as engine:
        with pytest.raises(EngineError, match=rf"POST {fake.url}/v1/completions answered HTTP 500: made-up trouble"):
            engine.generate([GenerationRequest(str(n), [5, 6], PLAIN) for n in range(3)])
        assert engine.health().ok
        assert engine.health().num_running == 0


def test_a_request_that_fails_ends_the_wait_of_its_own_stream_only(fake: _Fake, folder: Path) -> None:
    failed = asyncio.Event()

    async def answer(body: Any) -> Any:
        if body["prompt"] == [5]:
            failed.set()
            return 500
        await failed.wait()
        return _completion([7, 8, 9, 10], token_ids=[7, 8, 9, 10])

    fake.routes |= {"GET /v1/models": MODELS, "POST /v1/completions": answer}
    with (
        RemoteRollout([fake.url], str(folder)) as engine,
        engine.open_stream() as stream,
        engine.open_stream() as other,
    ):
        other.submit(GenerationRequest("other", [6], PLAIN))
        stream.submit(GenerationRequest("fails", [5], PLAIN), GenerationRequest("goes on", [7], PLAIN))
        with pytest.raises(EngineError, match="answered HTTP 500"):
            stream.drain(timeout=60)
        assert [result.request_id for result in stream.drain(timeout=60)] == ["goes on"]
        assert [result.token_ids for result in other.drain(timeout=60)] == [[7, 8, 9, 10]]
        stream.submit(GenerationRequest("fails", [6], PLAIN))  # its id is free again
        assert len(stream.drain(timeout=60)) == 1


def test_a_limit_of_the_servers_own_and_a_count_that_does_not_match_are_noticed(fake: _Fake, folder: Path) -> None:
    fake.routes |= {"GET /v1/models": MODELS, "POST /v1/completions": _completion([7, 8])}
    with RemoteRollout([fake.url], str(folder)) as engine:
        with pytest.raises(EngineError, match=r"stopped at 2 of 4 tokens.*--generation-config vllm"):
            engine.generate([GenerationRequest("a", [5, 6], PLAIN)])
        fake.routes["POST /v1/completions"] = _completion([7, 8, 9, 10], token_ids=[7])
        with pytest.raises(EngineError, match="1 tokens and 4 log-probs"):
            engine.generate([GenerationRequest("a", [5, 6], PLAIN)])


def test_images_are_refused_by_name(fake: _Fake, folder: Path) -> None:
    fake.routes["GET /v1/models"] = MODELS
    with (
        RemoteRollout([fake.url], str(folder)) as engine,
        pytest.raises(UnsupportedPromptError, match="'a' holds image; servers are sent token ids only"),
    ):
        engine.generate([GenerationRequest("a", [5], PLAIN, multi_modal={"image": [object()]})])


class _SGLang:
    """The routes of an SGLang server, as far as the dialect uses them."""

    def __init__(self, fake: _Fake) -> None:
        self.version = "default"
        self.written_by: str | None = None
        self.first_token = 10
        fake.routes |= {
            "GET /model_info": lambda body: {"model_path": "m", "model_type": "llama", "weight_version": self.version},
            "POST /generate": self._generate,
            "POST /pause_generation": {"status": "ok"},
            "POST /continue_generation": {"status": "ok"},
            "POST /flush_cache": {},
            "GET /server_info": {"tp_size": 1},
            "POST /update_weights_from_disk": {"success": True, "message": ""},
            "POST /update_weight_version": self._update,
        }

    def _generate(self, body: Any) -> Any:
        tokens = [self.first_token + n for n in range(body["sampling_params"]["max_new_tokens"])]
        meta = {"finish_reason": {"type": "length"}, "weight_version": self.written_by or self.version}
        return {"output_ids": tokens, "meta_info": meta | {"output_token_logprobs": [[-0.25, t, None] for t in tokens]}}

    def restart(self) -> None:
        self.version, self.first_token = "default", 90

    def _update(self, body: Any) -> Any:
        self.version, self.first_token = body["new_version"], 10
        return {"success": True, "message": ""}


class _VLLM:
    """The routes of a vLLM server with the extension. Its tokens name the version of its weights: 50 + version, or 99
    where it has those it was started with."""

    def __init__(self, fake: _Fake) -> None:
        self.version: int | None = None
        self.num_version_asks = 0
        fake.routes |= {
            "GET /v1/models": MODELS,
            "POST /v1/completions": lambda body: _completion([99 if self.version is None else 50 + self.version] * 4),
            "POST /collective_rpc": self._call,
            "POST /pause": {},
            "POST /resume": {},
            "POST /reset_prefix_cache": {},
        }

    def restart(self) -> None:
        self.version = None

    def _call(self, body: Any) -> Any:
        answer: Any = None
        if body["method"] == "dovetail_server_info":
            self.num_version_asks += 1
            answer = {"weight_version": self.version, "num_workers": 1, "shape": {}}
            answer["logprobs"] = "temperature"
        elif body["method"] == "dovetail_kv_cache_bytes":
            answer = 0
        elif body["method"] == "dovetail_set_version":
            (self.version,) = body["args"]
        return {"results": [answer]}


def test_turns_of_an_agent_ask_only_the_server_that_wrote_them_for_its_version(
    fake: _Fake, folder: Path, tmp_path: Path
) -> None:
    other = _Fake()
    both = [_VLLM(fake), _VLLM(other)]
    model = tiny_model("llama_tied")
    with RemoteRollout([fake.url, other.url], str(folder), weights_folder=str(tmp_path)) as engine:
        turns = [GenerationRequest(str(number), [5, 6], PLAIN, session="agent") for number in range(10)]
        engine.update_weights(model.named_parameters(), 3)
        (first,) = engine.generate(turns[:1])  # the first one after an update asks all
        before = [len(server.bodies("GET /v1/models")) for server in (fake, other)]
        for server in both:
            server.num_version_asks = 0
        results = [result for turn in turns[1:] for result in engine.generate([turn])]
        assert [result.token_ids for result in [first, *results]] == [[53] * 4] * 10
        assert [len(server.bodies("GET /v1/models")) for server in (fake, other)] == before
        assert sorted(server.num_version_asks for server in both) == [0, 9]
    other.close()


async def test_responses_that_end_together_share_one_question_for_the_version() -> None:
    class Asked:
        count = 0

        async def weight_version(self, server: str) -> int:
            self.count += 1
            await asyncio.sleep(0)
            return 3

    dialect, unused = Asked(), AsyncMock()
    calls = SampleCalls(ServerPool(["http://a:1"], HttpClient()), cast(Any, dialect), unused)
    assert await asyncio.gather(*(calls._version_now("http://a:1") for _ in range(20))) == [3] * 20
    assert dialect.count <= 2
    assert await calls._version_now("http://a:1") == 3
    assert dialect.count <= 3


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_was_started_again_unnoticed_answers_nothing_with_its_old_weights(
    kind: Any, fake: _Fake, folder: Path, tmp_path: Path
) -> None:
    other = _Fake()
    fakes = [_VLLM(one) if kind == "vllm" else _SGLang(one) for one in (fake, other)]
    asked = [GenerationRequest(str(number), [5, 6], PLAIN) for number in range(8)]
    urls = [fake.url, other.url]
    with RemoteRollout(urls, str(folder), dialect=kind, weights_folder=str(tmp_path)) as engine:
        engine.update_weights(tiny_model("llama_tied").named_parameters(), 3)
        good = [result.token_ids for result in engine.generate(asked)]
        fakes[0].restart()
        assert [result.token_ids for result in engine.generate(asked)] == good
    with RemoteRollout(urls[1:], str(folder), dialect=kind, weights_folder=str(tmp_path)) as engine:
        engine.update_weights(tiny_model("llama_tied").named_parameters(), 4)
        engine.generate(asked)
        fakes[1].restart()
        with pytest.raises(EngineError, match="those it was started with, not 4"):
            engine.generate(asked)
        engine.reload_weights = lambda fresh: fresh.update_weights(tiny_model("llama_tied").named_parameters(), 4)
        assert len({tuple(result.token_ids) for result in engine.generate(asked)} & {(99,) * 4, (90, 91, 92, 93)}) == 0
    other.close()


def test_an_sglang_server_takes_weights_from_disk_and_one_that_wrote_with_others_is_taken_out(
    fake: _Fake, folder: Path, tmp_path: Path
) -> None:
    sglang = _SGLang(fake)
    model = tiny_model("llama_tied")
    with RemoteRollout([fake.url], str(folder), dialect="sglang", weights_folder=str(tmp_path)) as engine:
        engine.update_weights(model.named_parameters(), 3)
        (update,) = fake.bodies("POST /update_weights_from_disk")
        # An update that flushes while a request is pending ends an SGLang server.
        assert update["flush_cache"] is False
        assert Path(update["model_path"], "model.safetensors.index.json").exists()
        assert fake.bodies("POST /flush_cache")
        (result,) = engine.generate([GenerationRequest("a", [5, 6], PLAIN)])
        assert (result.token_ids, result.weight_versions) == ([10, 11, 12, 13], [3] * 4)
        sglang.written_by = "2"
        with pytest.raises(EngineError, match="wrote with weights of version 2, not 3"):
            engine.generate([GenerationRequest("a", [5, 6], PLAIN)])


def test_an_sglang_server_that_does_not_take_the_weights_says_why(fake: _Fake, folder: Path, tmp_path: Path) -> None:
    _SGLang(fake)
    fake.routes["POST /update_weights_from_disk"] = {"success": False, "message": "no such folder"}
    with (
        RemoteRollout([fake.url], str(folder), dialect="sglang", weights_folder=str(tmp_path)) as engine,
        pytest.raises(ValueError, match="did not take the weights: no such folder"),
    ):
        engine.update_weights(tiny_model("llama_tied").named_parameters(), 3)


def test_min_p_is_kept_from_the_seeded_sampler_that_dies_of_it(fake: _Fake, folder: Path) -> None:
    _SGLang(fake)
    fake.routes["GET /server_info"] = {"tp_size": 1, "enable_deterministic_inference": True}
    with (
        RemoteRollout([fake.url], str(folder), dialect="sglang") as engine,
        pytest.raises(ValueError, match=r"min_p=0\.1.*dies of it"),
    ):
        engine.generate([GenerationRequest("a", [5], SamplingParams(min_p=0.1))])


def test_no_name_of_a_call_is_the_beginning_of_another(fake: _Fake, folder: Path) -> None:
    """SGLang aborts every request whose name begins with the one it is given."""
    _SGLang(fake)
    with RemoteRollout([fake.url], str(folder), dialect="sglang") as engine:
        engine.generate([GenerationRequest("a", [5], SamplingParams(n=12))])
    names = [body["rid"] for body in fake.bodies("POST /generate")]
    assert len(names) == 12
    assert not any(one != other and other.startswith(one) for one in names for other in names)


def test_an_aborted_answer_of_sglang_that_ends_with_a_stop_token_is_complete(fake: _Fake, folder: Path) -> None:
    _SGLang(fake)
    meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [[-0.5, 7, None], [-0.25, 2, None]]}
    fake.routes["POST /generate"] = {"meta_info": meta}
    with RemoteRollout([fake.url], str(folder), dialect="sglang") as engine:
        (result,) = engine.generate([GenerationRequest("a", [5], SamplingParams(max_new_tokens=9))])
    assert (result.finish_reason, result.token_ids, result.weight_versions) == ("stop", [7, 2], [0, 0])


def test_an_end_that_sglang_alone_knows_does_not_end_the_response(fake: _Fake, folder: Path) -> None:
    """SGLang joins the ids of config.json to those of generation_config.json, which alone count here."""
    _SGLang(fake)

    def generate(body: Any) -> Any:
        token = {1: 9, 2: 11, 3: 2}[len(body["input_ids"])]  # 9 ends a text for SGLang, 2 for the run
        entries = [[-0.5, token, None]]
        return {"meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": entries}}

    fake.routes["POST /generate"] = generate
    with RemoteRollout([fake.url], str(folder), dialect="sglang") as engine:
        (result,) = engine.generate([GenerationRequest("a", [5], SamplingParams(max_new_tokens=9))])
        assert (result.finish_reason, result.token_ids) == ("stop", [9, 11, 2])
        (cut,) = engine.generate([GenerationRequest("b", [5], SamplingParams(max_new_tokens=2))])
        assert (cut.finish_reason, cut.token_ids) == ("length", [9, 11])
    assert [body["sampling_params"]["max_new_tokens"] for body in fake.bodies("POST /generate")] == [9, 8, 7, 2, 1]


def test_a_server_that_does_not_go_on_after_a_pause_is_taken_out_and_the_engine_closes(
    fake: _Fake, folder: Path
) -> None:
    other = _Fake()
    for server in (fake, other):
        _SGLang(server)
    try:
        with RemoteRollout([fake.url, other.url], str(folder), dialect="sglang") as engine:
            engine.pause()
            other.routes["POST /continue_generation"] = 500
            engine.continue_()
            assert f"{other.url}: POST {other.url}/continue_generation answered HTTP 500" in engine.health().reason
            assert len(engine.generate([GenerationRequest("a", [5], PLAIN)])) == 1
            engine.pause()
            fake.routes["POST /continue_generation"] = 500
    finally:
        other.close()
    assert engine.health().reason == "the engine is closed"


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_pause_does_not_wait_for_a_server_that_hangs(
    fake: _Fake, folder: Path, monkeypatch: pytest.MonkeyPatch, dialect: Any
) -> None:
    for module in (vllm_dialect, sglang_dialect):
        monkeypatch.setattr(module, "PAUSE_TIMEOUT_S", 0.2)
    _SGLang(fake)
    hangs = lambda body: asyncio.sleep(30)  # noqa: E731
    fake.routes |= {"GET /v1/models": MODELS, "POST /pause": hangs, "POST /pause_generation": hangs}
    with RemoteRollout([fake.url], str(folder), dialect=dialect) as engine:
        began = time.monotonic()
        engine.pause()
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("case", ["vllm", "sglang", "sglang, scheduler too"])
def test_a_server_that_is_healthy_and_generates_no_token_is_named(
    fake: _Fake, folder: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(pool, "STALL_S", 0.5)
    monkeypatch.setattr(sglang_dialect, "COUNT_TIMEOUT_S", 0.1)
    monkeypatch.setitem(cast(Any, ServerPool.__init__).__kwdefaults__, "interval_s", 0.05)
    _SGLang(fake)
    hangs = lambda body: asyncio.sleep(30)  # noqa: E731
    loads = hangs if case.endswith("too") else {"loads": [{"num_used_tokens": 5}]}
    fake.routes |= {"GET /v1/models": MODELS, "GET /v1/loads": loads, "GET /metrics": "vllm:generation_tokens_total 5"}
    fake.routes |= {"POST /v1/completions": hangs, "POST /generate": hangs}
    dialect: Any = case.split(",")[0]
    named = rf"\({fake.url}: it answers its health checks and has generated no token"
    with RemoteRollout([fake.url], str(folder), dialect=dialect) as engine, pytest.raises(EngineError, match=named):
        engine.generate([GenerationRequest("a", [5], PLAIN)])


def test_a_server_that_missed_the_end_of_a_pause_is_not_paused_when_it_is_back(
    fake: _Fake, folder: Path, tmp_path: Path
) -> None:
    """It has the weights of the update, so nothing has to be sent again; but it would never answer a request."""
    other, paused = _Fake(), threading.Event()
    for server in (fake, other):
        _SGLang(server)
    other.routes |= {"POST /pause_generation": lambda body: paused.set(), "POST /continue_generation": 500}
    urls = [fake.url, other.url]
    try:
        with RemoteRollout(urls, str(folder), dialect="sglang", weights_folder=str(tmp_path)) as engine:
            engine.update_weights(tiny_model("llama_tied").named_parameters(), 3)
            assert "/continue_generation answered HTTP 500" in engine.health().reason
            other.routes["POST /continue_generation"] = lambda body: paused.clear()
            wait_until(lambda: not engine.health().reason, "the server to be admitted")
            assert not paused.is_set()
    finally:
        other.close()


def test_a_server_that_is_admitted_while_the_engine_goes_on_after_a_pause_goes_on_too(
    fake: _Fake, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not up when the others went on, and would never answer a request."""
    monkeypatch.setitem(cast(Any, ServerPool.__init__).__kwdefaults__, "interval_s", 0.05)
    other, paused, asked = _Fake(), threading.Event(), []
    for server in (fake, other):
        _SGLang(server)
    info = other.routes["GET /model_info"]
    other.routes["POST /pause_generation"] = lambda body: paused.set()
    other.routes["POST /continue_generation"] = lambda body: paused.clear()
    try:
        with RemoteRollout([fake.url, other.url], str(folder), dialect="sglang") as engine:
            other.routes["GET /model_info"] = 500
            wait_until(lambda: engine.health().reason, "the server to be down")
            engine.pause()

            async def go_on(body: Any) -> Any:
                asked.append(body)
                if len(asked) == 2:  # a health check, then the question of who admits it
                    await asyncio.to_thread(engine.continue_)
                return info(body)

            other.routes["GET /model_info"] = go_on
            wait_until(lambda: not engine.health().reason, "the server to be admitted")
            assert not paused.is_set()
    finally:
        other.close()


def test_a_request_that_waits_for_room_begins_no_call_while_the_engine_pauses(
    fake: _Fake, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_IN_FLIGHT", 1)
    sglang, begun, aborted = _SGLang(fake), threading.Event(), asyncio.Event()

    async def generate(body: Any) -> Any:
        if begun.is_set():
            return sglang._generate(body)
        begun.set()
        await aborted.wait()
        return {"meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": [[-0.5, 7, None]]}}

    fake.routes |= {"POST /generate": generate, "POST /abort_request": lambda body: aborted.set()}
    with RemoteRollout([fake.url], str(folder), dialect="sglang") as engine, engine.open_stream() as stream:
        stream.submit(*(GenerationRequest(str(number), [5], PLAIN) for number in range(3)))
        assert begun.wait(30)
        engine.pause()
        assert len(fake.bodies("POST /generate")) == 1
        engine.continue_()
        results = {result.request_id: result.token_ids for result in stream.drain(timeout=30)}
    assert results == {"0": [7, 10, 11, 12], "1": [10, 11, 12, 13], "2": [10, 11, 12, 13]}


def test_requests_that_run_when_no_server_answers_an_update_fail_instead_of_waiting(
    fake: _Fake, folder: Path, tmp_path: Path
) -> None:
    _SGLang(fake)
    begun, aborted = threading.Event(), asyncio.Event()

    async def generate(body: Any) -> Any:
        begun.set()
        await aborted.wait()
        return {"meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": [[-0.5, 7, None]]}}

    fake.routes |= {"POST /generate": generate, "POST /abort_request": lambda body: aborted.set()}
    with (
        RemoteRollout([fake.url], str(folder), dialect="sglang", weights_folder=str(tmp_path)) as engine,
        engine.open_stream() as stream,
    ):
        stream.submit(GenerationRequest("a", [5], PLAIN))
        assert begun.wait(30)
        fake.routes["GET /model_info"] = 500
        with pytest.raises(EngineError, match=r"no server answers: .*/model_info answered HTTP 500"):
            engine.update_weights(tiny_model("llama_tied").named_parameters(), 3)
        with pytest.raises(EngineError, match="'a' cannot be finished: the weight update to version 3 did not finish"):
            stream.drain(timeout=20)
