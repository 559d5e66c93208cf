"""The endpoint of a trajectory, with OpenAI's own client and with clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch

from dovetail.agents.calls import CallSettings
from dovetail.agents.chat import ChatRenderer
from dovetail.agents.endpoint import Endpoint, OpenSession, black_box, command_agent
from dovetail.agents.loops import as_loop, find_object
from dovetail.agents.parsers import turn_parser
from dovetail.agents.runner import Deadline, run_trajectory
from dovetail.agents.session import Session, SessionSettings
from dovetail.agents.tools.functions import FunctionToolbox
from dovetail.agents.types import Task, Trajectory
from dovetail.rollout.base import GenerationRequest, GenerationResult, SamplingParams
from dovetail.rollout.native.engine import NativeEngine
from tests.agents.tokenizers import family_tokenizer
from tests.models.tiny import tiny_model
from tests.rollout.test_native_engine import plain_log_probs

pytestmark = pytest.mark.unit

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "oak", "deep": true}}\n</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {"type": "object"}}}
HELLO: Any = [{"role": "user", "content": "Hello"}]


class ScriptedEngine:
    """Writes the given texts, each ended by the stop token; a token's log-prob says which it is."""

    def __init__(self, *texts: str, family: str = "qwen2.5") -> None:
        self.tokenizer = family_tokenizer(family)
        self.texts = list(texts)
        self.requests: list[GenerationRequest] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        text = self.texts.pop(0)
        await self.gate.wait()
        ids = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]
        reason: Any = "stop"
        if len(ids) > request.sampling.max_new_tokens:
            ids, reason = ids[: request.sampling.max_new_tokens], "length"
        return GenerationResult(request.request_id, 0, ids, [-float(i) for i in ids], reason, [0] * len(ids))

    def session(self, *, response_length: int = 2000, max_turns: int | None = None) -> Session:
        parse = turn_parser("hermes", self.tokenizer)
        settings = SessionSettings(ChatRenderer(self.tokenizer), parse, 500, response_length, max_turns)
        return Session("s", settings, self.generate, SamplingParams(seed=1))


@contextlib.asynccontextmanager
async def opened_over(session: Session) -> AsyncIterator[tuple[OpenSession, openai.AsyncOpenAI]]:
    async with (
        Endpoint.of_loop().open(session) as opened,
        openai.AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key) as client,
    ):
        yield opened, client


def post(opened: OpenSession, client: aiohttp.ClientSession, body: Any, path: str = "/v1/chat/completions") -> Any:
    headers = {"Authorization": f"Bearer {opened.api_key}"}
    return client.post(opened.url + path, data=body if isinstance(body, str) else json.dumps(body), headers=headers)


def check_rows(session: Session, engine: ScriptedEngine) -> None:
    """I11, and what I1 needs of rows: every sampled token once, with its own log-prob, and nothing else with one."""
    num_sampled = 0
    asked = [tuple(request.prompt_token_ids) for request in engine.requests]
    for segment in session.segments():
        response = segment.response
        row = segment.prompt_ids + response.token_ids
        num_sampled += sum(response.sampled)
        for id, sampled, log_prob, version in zip(
            response.token_ids, response.sampled, response.log_probs, response.weight_versions, strict=True
        ):
            assert (log_prob, version) == ((-float(id), 0) if sampled else (0.0, -1))
        begins = [
            at
            for at in range(len(response.token_ids))
            if response.sampled[at] and (at == 0 or not response.sampled[at - 1])
        ]
        for at in begins:  # what the engine read before a turn is what the row has before it
            assert row[: len(segment.prompt_ids) + at] in asked
    assert num_sampled == sum(len(turn.token_ids) for turn in session.turns)


def test_openais_client_runs_a_tool_loop_in_one_row() -> None:
    async def run() -> None:
        engine = ScriptedEngine(f"Let me see.\n{CALL}", "It is a tree.")
        async with opened_over(engine.session()) as (opened, client):
            messages: list[Any] = [{"role": "system", "content": "Be brief."}, *HELLO]
            first = await client.chat.completions.create(model="any", messages=messages, tools=[TOOL], temperature=0)
            choice = first.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Let me see."
            call: Any = choice.message.tool_calls[0] if choice.message.tool_calls else None
            assert (call.function.name, json.loads(call.function.arguments)) == (
                "look_up",
                {"word": "oak", "deep": True},
            )
            messages.append(choice.message.model_dump())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "A tree.<|im_end|>"})
            second = await client.chat.completions.create(model="any", messages=messages, tools=[TOOL])
            assert second.choices[0].message.content == "It is a tree."
            assert second.choices[0].finish_reason == "stop"
            assert second.usage is not None
            assert second.usage.prompt_tokens == len(engine.requests[1].prompt_token_ids)
            assert second.usage.completion_tokens == len(opened.session.turns[1].token_ids)
            assert engine.requests[0].sampling.temperature == 1.0, "the run's temperature holds"
        assert len(opened.session.segments()) == 1
        check_rows(opened.session, engine)

    asyncio.run(run())


def _trimmed(messages: list[Any]) -> list[Any]:
    return [{**m, "content": m["content"].strip()} if m.get("content") else m for m in messages]


def _reordered(messages: list[Any]) -> list[Any]:
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
            call["id"] = "another"
    return [dict(reversed(message.items())) for message in messages]


def _without_thinking(messages: list[Any]) -> list[Any]:
    return [{**m, "content": m["content"].rpartition("</think>")[2]} if m.get("content") else m for m in messages]


@pytest.mark.parametrize(("change", "num_rows"), [(_trimmed, 1), (_reordered, 1), (_without_thinking, 2)])
def test_clients_that_change_what_they_got_give_sound_rows(change: Callable[[Any], Any], num_rows: int) -> None:
    """I20: keys and outer spaces do not matter; a client that rewrites history gets a segment of its own."""

    async def run() -> None:
        engine = ScriptedEngine(f"<think>\nhm\n</think>\n\n  So.\n{CALL}", "Done.")
        async with opened_over(engine.session()) as (opened, client):
            first = await client.chat.completions.create(model="any", messages=HELLO, tools=[TOOL])
            answer = first.choices[0].message.model_dump(exclude_none=True)
            result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "A tree."}
            messages = change([*HELLO, answer, result])
            await client.chat.completions.create(model="any", messages=messages, tools=[TOOL])
        assert len(opened.session.segments()) == num_rows
        check_rows(opened.session, engine)

    asyncio.run(run())


def test_a_stream_has_the_same_completion() -> None:
    async def run() -> None:
        async with opened_over(ScriptedEngine(f"See.\n{CALL}").session()) as (_, client):
            stream = await client.chat.completions.create(
                model="any", messages=HELLO, tools=[TOOL], stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
        assert text == "See."
        assert [call.function.name for call in calls if call.function] == ["look_up"]
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
            "tool_calls"
        ]
        assert chunks[-1].usage is not None

    asyncio.run(run())


MESSAGES_TOOL = {"name": "look_up", "description": "", "input_schema": {"type": "object"}}


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_messages_are_the_same_turns_in_one_row(stream: bool) -> None:
    async def run() -> None:
        engine = ScriptedEngine(f"Let me see.\n{CALL}", "It is a tree.")
        async with Endpoint.of_loop().open(engine.session()) as opened, aiohttp.ClientSession() as client:

            async def ask(messages: list[Any]) -> dict[str, Any]:
                body = {"model": "any", "max_tokens": 100, "system": "Be brief.", "messages": messages}
                body |= {"tools": [MESSAGES_TOOL], "stream": stream}
                headers = {"x-api-key": opened.api_key}
                async with client.post(f"{opened.url}/v1/messages", json=body, headers=headers) as reply:
                    assert reply.status == 200, await reply.text()
                    return _from_events(await reply.text()) if stream else await reply.json()

            first = await ask(HELLO)
            text, call = first["content"]
            assert (first["stop_reason"], text) == ("tool_use", {"type": "text", "text": "Let me see."})
            assert (call["name"], call["input"]) == ("look_up", {"word": "oak", "deep": True})
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "A tree.<|im_end|>"}]
            asked = [*HELLO, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
            second = await ask(asked)
            assert (second["content"][0]["text"], second["stop_reason"]) == ("It is a tree.", "end_turn")
            assert second["usage"]["input_tokens"] == len(engine.requests[1].prompt_token_ids)
        assert len(opened.session.segments()) == 1
        check_rows(opened.session, engine)

    asyncio.run(run())


def _from_events(text: str) -> dict[str, Any]:
    """The message that a client puts together."""
    whole: dict[str, Any] = {}
    for line in text.split("\n"):
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {"type": ""}
        if event["type"] == "message_start":
            whole = event["message"]
        elif event["type"] == "content_block_start":
            whole["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], whole["content"][event["index"]]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            else:
                block["input"] = json.loads(delta["partial_json"])
        elif event["type"] == "message_delta":
            whole |= {**event["delta"], "usage": event["usage"]}
    return whole


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "of type text or tool_result"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "it has no 'tool_use_id'"),
        ({"messages": "hi"}, "must be a list"),
        ({"tools": [{"type": "web_search"}]}, "needs an input_schema"),
        ({"tool_choice": {"type": "any"}}, "use 'auto' or 'none'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not supported"),
    ],
)
def test_what_is_not_served_of_anthropics_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    async def run() -> None:
        async with (
            Endpoint.of_loop().open(ScriptedEngine().session()) as opened,
            aiohttp.ClientSession() as client,
            post(opened, client, {"messages": HELLO, **fields}, "/v1/messages") as reply,
        ):
            whole = await reply.json()
        assert (reply.status, whole["type"]) == (400, "error")
        assert words in whole["error"]["message"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "n=2 is not supported: a call is one turn"),
        ({"tool_choice": "required", "tools": [TOOL]}, "use 'auto' or 'none'"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs is not supported"),
        ({"max_tokens": 0.5}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "one of the roles"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "not as the API has it"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "it has no 'function'"),
        ({"response_format": "text"}, "not as the API has it"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "it has no 'function'"),
        ({"stop": [""]}, "stop="),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_and_not_retried(fields: dict[str, Any], words: str) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        async with opened_over(engine.session()) as (_, client):
            with pytest.raises(openai.BadRequestError, match=words):
                await client.chat.completions.create(**{"model": "any", "messages": HELLO, **fields})
        assert not engine.requests

    asyncio.run(run())


def test_limits_stop_strings_and_no_calls() -> None:
    async def run() -> None:
        async with opened_over(ScriptedEngine("One two three four five", "One. STOP two", CALL).session()) as (
            _,
            client,
        ):

            async def ask(**fields: Any) -> Any:
                whole = await client.chat.completions.create(model="any", messages=HELLO, **fields)
                return whole.choices[0]

            cut = await ask(max_tokens=3)
            assert cut.finish_reason == "length"
            stopped = await ask(stop=["STOP"])
            assert (stopped.message.content.strip(), stopped.finish_reason) == ("One.", "stop")
            none = await ask(tools=[TOOL], tool_choice="none")
            assert (none.message.content, none.message.tool_calls, none.finish_reason) == (CALL, None, "stop")

    asyncio.run(run())


def test_an_agent_of_text_with_stop_strings_has_one_row() -> None:
    """What would follow the stop string is not sampled, as if the engine had stopped; the turn is closed unsampled."""

    async def run() -> None:
        engine = ScriptedEngine("Action: look\nObservation: I make it up", "Answer: oak")
        async with opened_over(engine.session()) as (opened, client):
            messages: list[Any] = list(HELLO)
            for observation in ("a tree", ""):
                whole = await client.chat.completions.create(model="any", messages=messages, stop=["\nObservation:"])
                text = whole.choices[0].message.content
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": observation}]
        assert [messages[1]["content"], messages[3]["content"]] == ["Action: look", "Answer: oak"]
        (segment,) = opened.session.segments()
        row = engine.tokenizer.decode(segment.response.token_ids)
        assert row.startswith("Action: look<|im_end|>\n<|im_start|>user\na tree")
        check_rows(opened.session, engine)

    asyncio.run(run())


def test_a_client_that_lost_its_answer_gets_the_same_one() -> None:
    """I19: the connection is cut after the engine answered, or while it works; there is one turn."""

    async def run() -> None:
        engine = ScriptedEngine("First.", "Second.", "Third.")
        body = {"model": "any", "messages": HELLO}
        async with opened_over(engine.session()) as (opened, _):
            engine.gate.clear()
            async with aiohttp.ClientSession() as client:
                lost = asyncio.ensure_future(post(opened, client, body).__aenter__())
                while not engine.requests:
                    await asyncio.sleep(0)
                lost.cancel()
            answers = []
            async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as group:
                again = group.create_task(_json(post(opened, client, dict(reversed(body.items())))))
                while opened.num_running < 2:
                    await asyncio.sleep(0)
                engine.gate.set()
                answers.append(await again)
            async with aiohttp.ClientSession() as client:
                answers.append(await _json(post(opened, client, body)))
                assert answers[0] == answers[1]
                assert len(opened.session.turns) == 1
                # Who asks again on the same connection has read the answer and wants another one.
                other = await _json(post(opened, client, body))
            assert other["choices"][0]["message"]["content"] == "Second."
        assert len(opened.session.turns) == 2
        check_rows(opened.session, engine)

    async def _json(response: Any) -> Any:
        async with response as got:
            return await got.json()

    asyncio.run(run())


def test_openais_client_may_ask_for_samples_side_by_side() -> None:
    async def run() -> None:
        engine = ScriptedEngine("One.", "Two.")
        async with opened_over(engine.session()) as (opened, client):
            asked = [client.chat.completions.create(model="any", messages=HELLO) for _ in range(2)]
            texts = {whole.choices[0].message.content for whole in await asyncio.gather(*asked)}
        assert texts == {"One.", "Two."}
        assert len({request.sampling.seed for request in engine.requests}) == 2
        check_rows(opened.session, engine)

    asyncio.run(run())


def test_another_key_opens_no_session() -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        async with opened_over(engine.session()) as (opened, client), opened_over(engine.session()) as (other, _):
            for url in (opened.base_url, opened.base_url.replace(opened.name, "nobody")):
                with pytest.raises(openai.AuthenticationError, match="another key than its own"):
                    await client.with_options(base_url=url, api_key=other.api_key).models.list()
            assert [model.id for model in (await client.models.list()).data] == ["policy"]
            assert "127.0.0.1" in opened.url

    asyncio.run(run())


def run_agent(
    loop: Any, engine: ScriptedEngine, *, seconds: float = 600.0, text: str = "", **limits: Any
) -> Trajectory:
    async def run() -> Trajectory:
        row = {"reward_model": {"ground_truth": "42"}, "index": np.int64(1), "text": text}
        task = Task(HELLO, row, uid="u")
        settings = CallSettings()
        return await run_trajectory(
            task, loop, engine.session(**limits), FunctionToolbox([]), settings, Deadline(seconds)
        )

    return asyncio.run(run())


async def _ask(task: Task, base_url: str, api_key: str) -> float | None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: Any = list(task.messages)
        for _ in range(3):
            whole = await client.chat.completions.create(model="any", messages=messages)
            messages += [{"role": "assistant", "content": whole.choices[0].message.content}, *HELLO]
    return 0.5


def test_log_probs_of_rows_over_the_endpoint_are_the_models_own() -> None:
    """I1: a real engine, several turns of OpenAI's client, one of them after a rewritten history."""
    tokenizer = family_tokenizer("qwen2.5")
    model = tiny_model("llama", vocab_size=len(tokenizer))
    engine = NativeEngine(model)

    async def generate(request: GenerationRequest) -> GenerationResult:
        return (await asyncio.to_thread(engine.generate, [request]))[0]

    async def run() -> Session:
        parse = turn_parser("hermes", tokenizer)
        settings = SessionSettings(ChatRenderer(tokenizer), parse, 100, 400)
        session = Session("s", settings, generate, SamplingParams(seed=1, temperature=0.7, ignore_eos=True))
        async with opened_over(session) as (_, client):
            messages: Any = list(HELLO)
            for turn in range(4):
                whole = await client.chat.completions.create(model="any", messages=messages, max_tokens=12)
                text = whole.choices[0].message.content if turn != 1 else "something else"
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"More {turn}"}]
        return session

    session = asyncio.run(run())
    assert len(session.segments()) == 2
    for segment in session.segments():
        response = segment.response
        plain = plain_log_probs(model, list(segment.prompt_ids), list(response.token_ids), temperature=0.7)
        sampled = torch.tensor(response.sampled)
        assert sampled.any()
        assert (torch.tensor(response.log_probs) - plain)[sampled].abs().max() <= 1e-5


def test_a_function_of_an_address_is_a_loop() -> None:
    trajectory = run_agent(black_box(_ask), ScriptedEngine("a", "b", "c"))
    assert (trajectory.outcome, trajectory.reward) == ("finished", 0.5)
    assert len(trajectory.segments) == 1


def test_the_black_box_of_the_examples_walks_its_graph() -> None:
    example = Path(__file__).parents[2] / "examples" / "agents" / "black_box.py"
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "6*7"}}\n</tool_call>'
    engine = ScriptedEngine(call, "It is 42.")
    trajectory = run_agent(as_loop(find_object(f"{example}:run", key="agent_name")), engine)
    assert (trajectory.outcome, trajectory.reward) == ("finished", 1.0)
    assert len(trajectory.segments) == 1
    assert trajectory.messages[2]["content"] == "42"


def test_limits_of_the_trajectory_end_the_agent_by_their_names() -> None:
    turns = run_agent(black_box(_ask), ScriptedEngine("a", "b", "c"), max_turns=2)
    assert (turns.outcome, turns.reward) == ("max_turns", None)
    length = run_agent(black_box(_ask), ScriptedEngine("a", "b", "c"), response_length=8)
    assert length.outcome == "length"


def test_an_agent_that_raises_is_an_error_of_the_agent() -> None:
    async def broken(task: Task, base_url: str, api_key: str) -> None:
        raise KeyError("mine")

    trajectory = run_agent(black_box(broken), ScriptedEngine())
    assert (trajectory.outcome, trajectory.reward) == ("tool_error", None)
    assert "mine" in trajectory.error


@pytest.mark.parametrize(
    ("posted", "outcome", "reward"),
    [
        ({"reward": 0.25}, "finished", 0.25),
        ({"reward": 1, "outcome": "max_turns"}, "max_turns", 1.0),
        ({"outcome": "infra"}, "infra", None),
        ({"outcome": "tool_error"}, "tool_error", None),
    ],
)
def test_what_is_posted_at_the_end_holds(posted: Any, outcome: str, reward: float | None) -> None:
    async def agent(task: Task, base_url: str, api_key: str) -> None:
        headers = {"Authorization": f"Bearer {api_key}"}
        url = base_url.removesuffix("/v1") + "/finish"
        async with aiohttp.ClientSession(headers=headers) as client:
            for bad in ({"outcome": "lost"}, {"reward": "high"}, {"reward": float("nan")}, []):
                async with client.post(url, json=bad) as response:
                    assert response.status == 400
            async with client.post(url, json=posted) as response:
                assert response.status == 200
            await asyncio.Event().wait()  # goes on for ever: the end is the end

    trajectory = run_agent(black_box(agent), ScriptedEngine())
    assert (trajectory.outcome, trajectory.reward) == (outcome, reward)


def test_a_session_that_nobody_uses_ends_as_infrastructure() -> None:
    async def absent(task: Task, base_url: str, api_key: str) -> None:
        await asyncio.Event().wait()

    trajectory = run_agent(black_box(absent, idle_timeout_s=0.01), ScriptedEngine())
    assert (trajectory.outcome, trajectory.reward) == ("infra", None)
    assert "asked for nothing in 0.01 s" in trajectory.error


def test_after_a_start_that_failed_the_next_session_starts_the_server() -> None:
    async def run(port: int) -> None:
        endpoint = Endpoint(port=port)
        for _ in range(2):
            with pytest.raises(OSError, match="address already in use"):
                async with endpoint.open(ScriptedEngine().session()):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(run(taken.getsockname()[1]))


def test_a_session_that_is_cancelled_as_it_closes_is_closed() -> None:
    """It waits for its turn to close while others, which came together with it, have theirs to open."""

    async def run() -> None:
        endpoint, engine, over = Endpoint(), ScriptedEngine(), asyncio.Event()

        async def short() -> None:
            async with endpoint.open(engine.session()):
                asyncio.get_running_loop().call_soon(first.cancel)

        async def long() -> None:
            async with endpoint.open(engine.session()):
                await over.wait()

        first, second = asyncio.create_task(short()), asyncio.create_task(long())
        await asyncio.wait({first})
        assert first.cancelled()
        assert len(endpoint._sessions) == 1
        over.set()
        await second
        assert endpoint._runner is None, "the server listens on for nobody"

    asyncio.run(run())


_PROGRAM = """
import json, os, sys, urllib.request
task = json.loads(os.environ["DOVETAIL_TASK"])
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=60))
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = post(url, {"messages": task["messages"]})["choices"][0]["message"]["content"]
print("the answer was", answer)
if answer == "crash":
    sys.exit(3)
post(os.environ["DOVETAIL_FINISH_URL"], {"reward": len(answer) + task["row"]["index"]})
"""


def test_a_program_is_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which is not there, and not asked
    program = tmp_path / "agent.py"
    program.write_text(_PROGRAM)
    loop = command_agent(f"{sys.executable} -S -E {program}")
    good = run_agent(loop, ScriptedEngine("four"))
    assert (good.outcome, good.reward) == ("finished", 5.0)
    assert len(good.segments) == 1
    bad = run_agent(loop, ScriptedEngine("crash"))
    assert (bad.outcome, bad.reward) == ("tool_error", None)
    assert "ended with code 3: the answer was crash" in bad.error
    # A child that it leaves behind, with its output open, does not keep the trajectory from ending.
    program.write_text("import subprocess\nsubprocess.Popen(['sleep', '600'])\n")
    left = run_agent(command_agent(f"{sys.executable} -S -E {program}", idle_timeout_s=20.0), ScriptedEngine())
    assert left.outcome == "tool_error"
    assert "has not asked the model for a turn" in left.error
    program.write_text(_PROGRAM)
    long = "x" * 140_000  # more than a variable of the environment takes
    failed = run_agent(command_agent(f"{sys.executable} -S -E {program}"), ScriptedEngine("four"), text=long)
    assert failed.outcome == "tool_error"
    assert "KeyError" in failed.error
    assert "is on standard input only, too long for DOVETAIL_TASK" in failed.error
    program.write_text(_PROGRAM.replace('json.loads(os.environ["DOVETAIL_TASK"])', "json.load(sys.stdin)"))
    for text in (long, ""):
        read = run_agent(command_agent(f"{sys.executable} -S -E {program}"), ScriptedEngine("four"), text=text)
        assert read.reward == 5.0
    absent = run_agent(command_agent("/nowhere/agent"), ScriptedEngine())
    assert absent.outcome == "infra"
    assert "does not start" in absent.error
