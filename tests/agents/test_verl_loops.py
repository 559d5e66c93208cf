"""Agent loops that were written for verl, as they are: their tokens, masks and rewards over the embedded engine."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from dovetail.agents.chat import ChatRenderer
from dovetail.agents.loops import get_loop, load_loops
from dovetail.agents.session import Session, SessionSettings, TrajectoryEnd
from dovetail.agents.stream import AgentStream
from dovetail.agents.types import Task, ToolCall, ToolResult
from dovetail.agents.verl.alias import alias_verl
from dovetail.config.root import DovetailConfig
from dovetail.config.user_code import UserCodeError, import_user_modules
from dovetail.protocol import DataProto
from dovetail.rollout.base import SamplingParams
from dovetail.rollout.native.engine import NativeEngine
from tests.agents.exactness import agents_for, check_log_probs, rollout_config, task_prompts
from tests.agents.fakes import STOP, FakeEngine, FakeRenderer, parse
from tests.agents.tokenizers import family_tokenizer
from tests.models.tiny import tiny_model, tiny_tokenizer
from tests.waiting import on_thread, wait_until

pytestmark = pytest.mark.unit

LOOP = """
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.replica import TokenOutput

AFTER = {}


@register("verl_turns")
class Turns(AgentLoopBase):
    def __init__(self, *args, tokens: int = 6, **kwargs):
        super().__init__(*args, **kwargs)
        self.tokens = tokens
        self.response_length = self.rollout_config.response_length

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages, metrics, request_id = list(kwargs["raw_prompt"]), {}, uuid4().hex
        prompt_ids = await self.apply_chat_template(messages)
        ids, mask, log_probs = list(prompt_ids), [], []
        for turn in range(3):
            with simple_timer("generate_sequences", metrics):
                output: TokenOutput = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=ids,
                    sampling_params={**sampling_params, "max_tokens": self.tokens}, image_data=None,
                )
            ids += output.token_ids
            mask += [1] * len(output.token_ids)
            log_probs += output.log_probs
            await AFTER.get((kwargs["uid"], turn), _nothing)()
            said = [{"role": "tool", "content": str(kwargs["index"])}]
            observed = await self.loop.run_in_executor(None, lambda: self.tokenizer.encode(str(said)))
            ids += observed
            mask += [0] * len(observed)
            log_probs += [0.0] * len(observed)
        response_ids = ids[len(prompt_ids):]
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids[: self.response_length],
            response_mask=mask[: self.response_length],
            response_logprobs=log_probs[: self.response_length],
            num_turns=7,
            reward_score=float(len(output.token_ids)),
            metrics=metrics,
            extra_fields={"turn_scores": [0.5], "seen": kwargs["extra_info"]["name"], "steps": output.extra_fields},
        )


async def _nothing():
    pass
"""


@pytest.fixture(autouse=True)
def _without_alias(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:  # another test's
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "verl" or name.startswith("dovetail_user_"):
            del sys.modules[name]


def loaded(folder: Path, code: str, arguments: str = "", *, name: str = "verl_turns", cls: str = "Turns") -> Any:
    """The module of a loop that a YAML file names."""
    (folder / "verl_loop.py").write_text(code)
    entry = f"- {{name: {name}, _target_: '{folder / 'verl_loop.py'}:{cls}'{arguments}}}\n"
    (folder / "loops.yaml").write_text(entry)
    load_loops(str(folder / "loops.yaml"))
    return next(module for key, module in sys.modules.items() if key.startswith("dovetail_user_verl_loop"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_model("llama_tied").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def stream_over(engine: NativeEngine, **changes: Any) -> AgentStream:
    rollout = rollout_config(**changes)
    agents = agents_for(rollout, default_loop="verl_turns")
    config = DovetailConfig(actor_rollout_ref={"rollout": {"prompt_length": 64, "response_length": 300, **changes}})
    agents = dataclasses.replace(agents, session=dataclasses.replace(agents.session, config=config))
    return AgentStream(engine, rollout, agents, pad_token_id=0)


def prompts(count: int) -> DataProto:
    infos = np.array([{"index": 40 + row, "name": f"row {row}"} for row in range(count)], dtype=object)
    return task_prompts(count).union(DataProto.from_dict(non_tensors={"extra_info": infos}))


def finished(stream: AgentStream, count: int) -> DataProto:
    stream.run(count)
    batch = stream.take(order=[f"draw-{row}" for row in range(count)])
    stream.close()
    assert batch is not None
    return batch


def test_a_loop_for_verl_keeps_its_tokens_across_a_weight_update(model: Path, tmp_path: Path) -> None:
    """The engine's log-probs of both versions, in the midst of a trajectory, are the trainer's."""
    engine, new = NativeEngine(model), tiny_model("llama_tied", seed=1)
    code = loaded(tmp_path, LOOP, ", tokens: 5")

    async def update() -> None:
        await asyncio.to_thread(engine.update_weights, new.named_parameters(), 1)

    code.AFTER["draw-1", 1] = update
    stream = stream_over(engine)
    stream.start(prompts(2))
    batch = finished(stream, 2)
    columns, others = batch.tensors, batch.non_tensor_batch
    assert set(others["outcome"]) == {"finished"}
    assert others["num_turns"].tolist() == [3] * 4
    assert others["agent_reward"].tolist() == [5.0] * 4
    assert columns["response_mask"].sum(dim=1).tolist() == [15] * 4
    assert set(columns["weight_version"].unique().tolist()) == {-1, 0, 1}
    check_log_probs(batch, {0: tiny_model("llama_tied"), 1: new})
    said = [event for event in others["events"][0] if event["kind"] == "loop"]
    assert said[0]["metrics"]["num_turns"] == 7
    assert said[0]["metrics"]["generate_sequences"] > 0
    assert "num_preempted" not in said[0]["metrics"]
    assert said[0]["extra_fields"]["turn_scores"] == [0.5]
    assert said[0]["extra_fields"]["seen"] == "row 0"
    assert {"global_steps", "min_global_steps", "max_global_steps"} == said[0]["extra_fields"]["steps"].keys()
    roles = [message["role"] for message in others["messages"][0]]
    assert roles == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert "40" in others["messages"][0][2]["content"]


@pytest.mark.parametrize("replays", [True, False])
def test_after_a_resume_a_loop_begins_again_unless_it_says_that_it_replays(
    model: Path, tmp_path: Path, replays: bool
) -> None:
    loaded(tmp_path, LOOP, f", replays: {str(replays).lower()}")
    straight = stream_over(NativeEngine(model))
    straight.start(prompts(2))
    wanted = finished(straight, 2)
    engine = NativeEngine(model)
    stream = stream_over(engine)
    stream.start(prompts(2))
    running = on_thread(stream.run, 2)
    wait_until(lambda: engine.stats.decode_tokens >= 20, "some turns")
    engine.pause()
    snapshot = stream.snapshot()
    stream.close()
    running.exception(60)
    assert snapshot is not None
    assert bool((snapshot.tensors["weight_version"] >= 0).any()) == replays
    other = NativeEngine(model)
    resumed = stream_over(other)
    resumed.start(prompts(2), snapshot)
    rows = finished(resumed, 2)
    # The same seeds: begun again, or gone on with, the same tokens.
    for name in ("responses", "response_mask"):
        assert torch.equal(rows.tensors[name], wanted.tensors[name])
    kinds = [event["kind"] for events in rows.non_tensor_batch["events"] for event in events]
    assert ("restart" in kinds) != replays
    sampled = int(wanted.tensors["response_mask"].sum())
    assert (other.stats.decode_tokens < sampled - 10) == replays


def test_a_row_without_room_is_graded_as_it_is(model: Path, tmp_path: Path) -> None:
    loaded(tmp_path, LOOP)
    stream = stream_over(NativeEngine(model), response_length=10)
    stream.start(prompts(1))
    batch = finished(stream, 1)
    assert set(batch.non_tensor_batch["outcome"]) == {"length"}
    assert batch.tensors["response_mask"].sum(dim=1).tolist() == [6, 6]
    check_log_probs(batch, {0: tiny_model("llama_tied")})


# ---- one trajectory, over an engine that says what a test wrote ----

CODE = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class One(AgentLoopBase):
    def __init__(self, *args, tools=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.tools = {tool.name: tool for tool in tools.tools}

    async def run(self, sampling_params, **kwargs):
        return await PLAY(self, sampling_params, kwargs)
"""


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def _called(call: ToolCall) -> ToolResult:
    return ToolResult(f"{call.name} {call.arguments}", 0.25, metrics={"looks": 1.0})


def play(tmp_path: Path, engine: FakeEngine, body: Any) -> tuple[Any, Session]:
    code = loaded(tmp_path, CODE, name="one", cls="One")
    code.PLAY = body
    limits = {"prompt_length": 20, "response_length": 40}
    config = DovetailConfig(actor_rollout_ref={"rollout": limits})
    settings = SessionSettings(FakeRenderer(), parse, **limits, config=config)
    sampling = SamplingParams(seed=7, temperature=0.5, stop_token_ids=(STOP,))
    session = Session("s", settings, engine.generate, sampling, abort=engine.abort)
    session.tools = SimpleNamespace(schemas=[LOOK], after=lambda messages: messages, call=_called)
    task = Task([{"role": "user", "content": "hi"}], {"reward_model": {"ground_truth": "7"}}, uid="u")
    return asyncio.run(get_loop("one")(task, session)), session


def output(loop: Any, prompt: list[int], response: list[int], mask: list[int] | None = None, **fields: Any) -> Any:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput  # type: ignore[missing-import]

    mask = [1] * len(response) if mask is None else mask
    return AgentLoopOutput(prompt_ids=prompt, response_ids=response, response_mask=mask, metrics={}, **fields)


def test_the_mask_of_the_loop_holds_and_log_probs_are_the_engines(tmp_path: Path) -> None:
    async def body(loop: Any, params: Any, row: Any) -> Any:
        assert params["temperature"] == 0.5
        assert row["reward_model"] == {"ground_truth": "7"}
        assert loop.config.actor_rollout_ref.rollout.get("response_length") == loop.response_length == 40
        said = await loop.server_manager.generate("x", prompt_ids=[5, 6], sampling_params=params)
        ids = [5, 6, *said.token_ids, 9]
        again = await loop.server_manager.generate("x", prompt_ids=ids, sampling_params=params)
        response = [*ids[2:], *again.token_ids]
        mask = [0] * (len(ids) - 2) + [1] * len(again.token_ids)
        return output(loop, [5, 6], response, mask, response_logprobs=[-9.0] * len(response), reward_score=2)

    reward, session = play(tmp_path, FakeEngine("ab", "cd"), body)
    assert reward == 2.0
    (segment,) = session.segments()
    assert segment.prompt_ids == (5, 6)
    assert segment.response.token_ids == (ord("a"), ord("b"), STOP, 9, ord("c"), ord("d"), STOP)
    assert segment.response.sampled == (False,) * 4 + (True,) * 3
    assert segment.response.log_probs == (0.0,) * 4 + (-0.5,) * 3
    assert segment.response.weight_versions == (-1,) * 4 + (0,) * 3
    assert session.messages[-1]["content"] == "cd"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ids: [*ids[:1], 99, *ids[2:]], r"position 1 of response_ids \(token 99, 'c'\)"),
        (lambda ids: ids[1:], r"position 0 of response_ids \(token 98, 'b'\)"),
        (lambda ids: [*ids, 7], "position 3 of response_ids .* no generate call"),
        (lambda ids: [1] * 41, "response_ids has 41 tokens, more than rollout.response_length=40"),
    ],
    ids=["encoded again", "after other ids", "appended", "too long"],
)
def test_tokens_that_were_not_sampled_are_not_trained_on(tmp_path: Path, change: Any, says: str) -> None:
    async def body(loop: Any, params: Any, row: Any) -> Any:
        said = await loop.server_manager.generate("x", prompt_ids=[5], sampling_params=params)
        return output(loop, [5], change(said.token_ids))

    with pytest.raises(ValueError, match=says):
        play(tmp_path, FakeEngine("ab"), body)


def test_what_two_outputs_share_is_trained_in_the_first(tmp_path: Path) -> None:
    async def body(loop: Any, params: Any, row: Any) -> Any:
        first = (await loop.server_manager.generate("x", prompt_ids=[5], sampling_params=params)).token_ids
        left, right = [
            (await loop.server_manager.generate("x", prompt_ids=[5, *first, mark], sampling_params=params)).token_ids
            for mark in (8, 9)
        ]
        head = [1] * len(first)
        return [
            output(loop, [5], [*first, 8, *left], [*head, 0, *[1] * len(left)]),
            output(loop, [5], [*first, 9, *right], [*head, 0, *[1] * len(right)], reward_score=0.5),
        ]

    reward, session = play(tmp_path, FakeEngine("a", "b", "c"), body)
    assert reward == 0.5
    one, two = session.segments()
    assert one.response.sampled == (True, True, False, True, True)
    assert two.response.sampled == (False, False, False, True, True)


def test_samples_that_read_the_same_are_trained_each_in_its_own_row(tmp_path: Path) -> None:
    async def body(loop: Any, params: Any, row: Any) -> Any:
        ask = loop.server_manager.generate
        said = [await ask("x", prompt_ids=[5], sampling_params=params) for _ in range(3)]
        return [output(loop, [5], one.token_ids) for one in said]

    _, session = play(tmp_path, FakeEngine("yes", "no", "yes"), body)
    assert [segment.response.sampled for segment in session.segments()] == [(True,) * 4, (True,) * 3, (True,) * 4]


def test_a_loop_chooses_where_a_turn_ends_and_nothing_else(tmp_path: Path) -> None:
    engine = FakeEngine("ask</a>more", "long answer", "ab")

    async def body(loop: Any, params: Any, row: Any) -> Any:
        ask = loop.server_manager.generate
        first = await ask("x", prompt_ids=[5], sampling_params={**params, "stop": ["</a>"], "n": 1})
        assert "".join(map(chr, first.token_ids)) == "ask</a>"
        second = await ask("x", prompt_ids=[5, *first.token_ids], sampling_params={**params, "max_new_tokens": 4})
        assert len(second.token_ids) == 4
        ids = [*first.token_ids, *second.token_ids]
        await ask("x", prompt_ids=[5, *ids], sampling_params={**params, "stop_token_ids": [77]})
        for name, value in (("temperature", 1.0), ("frequency_penalty", 0.2)):
            with pytest.raises(ValueError, match=name):
                await ask("x", prompt_ids=[5], sampling_params={**params, name: value})
        with pytest.raises(ValueError, match="images, videos and sounds are not shown"):
            await ask("x", prompt_ids=[5], sampling_params=params, image_data=["pixels"])
        return output(loop, [5], ids)

    with pytest.raises(TrajectoryEnd) as end:  # the row ends within a turn that had no room
        play(tmp_path, engine, body)
    assert end.value.outcome == "length"
    assert engine.requests[-1].sampling.stop_token_ids == (STOP, 77)
    assert [request.request_id for request in engine.requests] == ["s/0", "s/1", "s/2"]


def test_appending_messages_as_verl_does(tmp_path: Path) -> None:
    async def body(loop: Any, params: Any, row: Any) -> Any:
        messages = list(row["raw_prompt"])
        assert await loop.process_multi_modal_info(messages) == {}
        with pytest.raises(ValueError, match="images, videos and sounds"):
            await loop.process_vision_info([{"role": "user", "content": [{"type": "image"}]}])
        loop._assert_mm_supported(False)
        with pytest.raises(ValueError, match="images, videos and sounds"):
            loop._assert_mm_supported(True)
        assert loop._get_mm_processor_kwargs(None) == {}
        prompt = await loop.ct_build_initial_tokens(messages)
        said = await loop.server_manager.generate("x", prompt_ids=prompt, sampling_params=params)
        merged, mask, probs = await loop.ct_merge_assistant_token(
            prompt, said.token_ids, [], [], assistant_logprobs=said.log_probs
        )
        before = [*messages, {"role": "assistant", "content": "ab"}]
        after = [*before, {"role": "tool", "content": "z"}]
        merged, mask, probs = await loop.ct_merge_non_assistant_msg(before, after, merged.token_ids, mask, probs)
        observed = [1003, ord("z"), STOP, 1002]
        assert merged.token_ids == [*prompt, ord("a"), ord("b"), STOP, *observed]
        assert (mask, probs) == ([1] * 3 + [0] * 4, [-0.5] * 3 + [0.0] * 4)
        with pytest.raises(ValueError, match="must end with the model's answer"):
            await loop.ct_merge_non_assistant_msg(messages, after, merged.token_ids, mask)
        return output(loop, prompt, merged.token_ids[len(prompt) :], mask)

    reward, session = play(tmp_path, FakeEngine("ab"), body)
    assert reward is None
    assert session.segments()[0].prompt_ids == (1001, ord("h"), ord("i"), STOP, 1002)


def test_tools_of_the_run_are_called_through_the_session(tmp_path: Path) -> None:
    async def body(loop: Any, params: Any, row: Any) -> Any:
        look = loop.tools["look"]
        assert look.tool_schema.model_dump(exclude_unset=True, exclude_none=True) == LOOK
        instance, _ = await look.create(create_kwargs={})
        response, reward, metrics = await look.execute(instance, {"x": 1}, agent_data=None)
        await look.release(instance)
        assert (response.text, reward, metrics) == ("look {'x': 1}", 0.25, {"looks": 1.0})
        said = await loop.server_manager.generate("x", prompt_ids=[5], sampling_params=params)
        return output(loop, [5], said.token_ids)

    assert len(play(tmp_path, FakeEngine("ab"), body)[1].segments()) == 1


def test_a_loop_that_never_asks_or_returns_something_else_is_an_error(tmp_path: Path) -> None:
    async def silent(loop: Any, params: Any, row: Any) -> Any:
        return output(loop, [5], [])

    async def other(loop: Any, params: Any, row: Any) -> Any:
        return "text"

    assert play(tmp_path, FakeEngine(), silent)[1].segments() == ()  # which the runner reports
    with pytest.raises(ValueError, match="run returned str; it must return an AgentLoopOutput"):
        play(tmp_path, FakeEngine(), other)


async def test_messages_without_the_templates_system_prompt() -> None:
    """What loops for earlier versions of verl append: the message alone."""
    alias_verl()
    from verl.experimental.agent_loop.agent_loop import (  # type: ignore[missing-import]
        AgentLoopBase,
        DictConfigWrap,
    )

    class Plain(AgentLoopBase):
        async def run(self, sampling_params: Any, **kwargs: Any) -> Any: ...

        @classmethod
        def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
            cls.level = kwargs["level"]

    tokenizer = family_tokenizer("smollm2")
    rollout = {"actor_rollout_ref": {"rollout": {"prompt_length": 100, "response_length": 9}}, "data": {}}
    loop_config = DictConfigWrap(OmegaConf.create(rollout))
    server = SimpleNamespace(renderer=ChatRenderer(tokenizer))
    loop = Plain(loop_config, server, tokenizer, None, level=3)
    message = [{"role": "user", "content": "hi"}]
    assert loop.level == 3
    whole = await loop.apply_chat_template(message)
    alone = await loop.apply_chat_template(message, remove_system_prompt=True)
    assert tokenizer.decode(alone) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(whole).startswith("<|im_start|>system\n")
    assert whole[-len(alone) :] == alone
    other = family_tokenizer("phi")
    server = SimpleNamespace(renderer=ChatRenderer(other))
    with pytest.raises(ValueError, match="a message has no ids of its own"):
        await Plain(loop_config, server, other, None, level=3).apply_chat_template(message, remove_system_prompt=True)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"extra_fields": {"image": object()}}, r"extra_fields\['image'\] is object"),
        ({"multi_modal_data": {"images": [1]}}, "images, videos and sounds are not shown"),
    ],
)
def test_an_output_that_cannot_be_kept_is_refused(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    async def body(loop: Any, params: Any, row: Any) -> Any:
        said = await loop.server_manager.generate("x", prompt_ids=[5], sampling_params=params)
        return output(loop, [5], said.token_ids, **fields)

    with pytest.raises(ValueError, match=says):
        play(tmp_path, FakeEngine("ab"), body)


async def test_tool_calls_are_parsed_with_the_runs_formats() -> None:
    alias_verl()
    from verl.experimental.agent_loop.tool_parser import ToolParser  # type: ignore[missing-import]

    tokenizer = tiny_tokenizer()
    text = 'So.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><tool_call>{"name": </tool_call>'
    said, calls = await ToolParser.get_tool_parser("hermes", tokenizer).extract_tool_calls(tokenizer.encode(text))
    assert (said, [(call.name, call.arguments) for call in calls]) == ("So.", [("f", '{"x": 1}')])


def test_verls_own_loops_are_not_there_to_be_subclassed() -> None:
    alias_verl()
    with pytest.raises(ImportError, match="tool_agent is a loop of dovetail's own"):
        from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop  # noqa: F401
    with pytest.raises(ImportError, match="single_turn_agent is a loop of dovetail's own"):
        from verl.experimental.agent_loop import SingleTurnAgentLoop  # noqa: F401


def test_a_loop_for_verl_in_import_modules_is_told_where_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process imports those modules, scoring processes too."""
    (tmp_path / "loop_for_verl.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserCodeError, match=r"belongs in rollout\.agent\.agent_loop_config_path"):
        import_user_modules(["loop_for_verl"])
