"""Many trajectories over the embedded engine: exact log-probs, groups as they finish, faults, and a resume."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.agents.stream import AgentStream
from dovetail.agents.types import InfrastructureError
from dovetail.observability.stalls import StalledError
from dovetail.protocol import DataProto
from dovetail.rollout import loop_thread
from dovetail.rollout.native.engine import NativeEngine
from tests.agents.exactness import agents_for, check_engine, check_log_probs, rollout_config, task_prompts
from tests.agents.test_loops import ScriptedTools
from tests.models.tiny import tiny_model
from tests.waiting import on_thread, wait_until

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama_tied").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def finished(stream: AgentStream, count: int) -> DataProto:
    stream.run(count)
    batch = stream.take(order=[f"draw-{row}" for row in range(count)])
    assert batch is not None
    return batch


def equal_rows(one: DataProto, other: DataProto) -> None:
    for name in ("prompts", "responses", "response_mask", "weight_version"):
        assert torch.equal(one.tensors[name], other.tensors[name]), name
    assert torch.allclose(one.tensors["rollout_log_probs"], other.tensors["rollout_log_probs"], atol=1e-5)
    for name in ("uid", "trajectory", "segment", "outcome", "num_turns"):
        assert one.non_tensor_batch[name].tolist() == other.non_tensor_batch[name].tolist(), name


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=["plain", "top-p"])
def test_the_trainers_log_probs_of_every_sampled_token_are_the_engines(
    folder: Path, sampling: dict[str, float]
) -> None:
    engine = NativeEngine(folder)
    old, new = tiny_model("llama_tied"), tiny_model("llama_tied", seed=1)
    check_engine(engine, {0: old, 1: new}, lambda: engine.update_weights(new.named_parameters(), 1), **sampling)


def test_one_turn_is_what_generation_without_agents_gives(folder: Path) -> None:
    """Same seed, same number of the sample, same prompt: the same tokens."""
    from dovetail.agents.chat import ChatRenderer
    from dovetail.rollout.base import GenerationRequest, SamplingParams
    from tests.models.tiny import tiny_tokenizer

    engine, rollout = NativeEngine(folder), rollout_config(response_length=12)
    stream = AgentStream(engine, rollout, agents_for(rollout, default_loop="single_turn_agent"), pad_token_id=0)
    stream.start(task_prompts(1, n=3))
    batch = finished(stream, 1)
    prompt = ChatRenderer(tiny_tokenizer()).start([{"role": "user", "content": "task 0"}])
    plain = engine.generate([GenerationRequest("a", prompt, SamplingParams(n=3, seed=100, max_new_tokens=12))])
    for row, result in enumerate(plain):
        kept = batch.tensors["response_mask"][row].bool()
        assert batch.tensors["responses"][row][kept].tolist() == result.token_ids
    assert set(batch.non_tensor_batch["outcome"]) <= {"length", "finished"}


def test_a_group_leaves_when_all_its_trajectories_have_ended_and_others_go_on_later(folder: Path) -> None:
    engine, rollout = NativeEngine(folder), rollout_config()
    stream = AgentStream(engine, rollout, agents_for(rollout), pad_token_id=0)
    stream.start(task_prompts(3))
    stream.run(1)
    engine.pause()
    first = stream.take()
    assert first is not None
    stream.start(task_prompts(4).slice(3, 4))
    stream.abort(["draw-3"])
    engine.continue_()
    stream.run(4)
    rows = DataProto.concat([part for part in (first, stream.take()) if part is not None])
    uids = rows.non_tensor_batch["uid"].tolist()
    assert sorted(uids) == [uid for uid in ("draw-0", "draw-1", "draw-2") for _ in range(4)]
    assert [uids[start] for start in range(0, 12, 4)] == list(dict.fromkeys(uids))
    assert stream.num_running == 0
    check_log_probs(rows, {0: tiny_model("llama_tied")})


def test_requests_on_their_way_to_the_engine_are_aborted_once_it_has_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rollout = NativeEngine(folder), rollout_config()
    enqueue, abort = engine.enqueue, engine.abort
    on_the_way, aborted = threading.Event(), threading.Event()
    order: list[str] = []

    def slow_enqueue(*args: Any) -> None:
        on_the_way.set()
        aborted.wait(0.2)  # an abort that does not wait comes first
        enqueue(*args)
        order.append("enqueued")

    def noted_abort(*args: Any) -> int:
        count = abort(*args)
        order.append("aborted")
        aborted.set()
        return count

    monkeypatch.setattr(engine, "enqueue", slow_enqueue)
    monkeypatch.setattr(engine, "abort", noted_abort)
    engine.pause()
    stream = AgentStream(engine, rollout, agents_for(rollout), pad_token_id=0)
    stream.start(task_prompts(1))
    stream.generate_in_background()
    assert on_the_way.wait(60)
    stream.abort(["draw-0"])
    assert (order[0], order[-1]) == ("enqueued", "aborted")
    stream.close()


def test_generation_in_the_background(folder: Path) -> None:
    engine, rollout = NativeEngine(folder), rollout_config()
    stream = AgentStream(engine, rollout, agents_for(rollout), pad_token_id=0)
    stream.generate_in_background()
    stream.start(task_prompts(2))
    parts = []
    while sum(len(part) for part in parts) < 8:
        stream.wait(60)
        part = stream.take()
        assert part is not None, "a group should have finished within a minute"
        parts.append(part)
    stream.close()
    other = AgentStream(engine, rollout, agents_for(rollout), pad_token_id=0)
    other.start(task_prompts(2))
    rows = DataProto.concat(parts)
    order = np.argsort(rows.non_tensor_batch["uid"].astype(str), kind="stable").tolist()
    equal_rows(rows.select_idxs(order), finished(other, 2))


def test_the_engine_is_told_which_conversations_are_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rollout = NativeEngine(folder), rollout_config()
    over: list[str] = []
    monkeypatch.setattr(engine, "end_session", over.append)
    stream = AgentStream(engine, rollout, agents_for(rollout), pad_token_id=0)
    stream.start(task_prompts(2))
    finished(stream, 2)
    wait_until(lambda: len(over) == 4, "the end of four conversations")
    assert sorted(over) == ["draw-0/0", "draw-0/1", "draw-1/0", "draw-1/1"]


def test_what_is_unfinished_goes_on_elsewhere_from_its_tokens(folder: Path, tmp_path: Path) -> None:
    """Stopped in the middle of a turn, saved, and resumed in another engine: as if nothing had happened (I8)."""
    engine, rollout = NativeEngine(folder), rollout_config()
    straight = AgentStream(engine, rollout, agents_for(rollout), pad_token_id=0)
    straight.start(task_prompts(3))
    wanted = finished(straight, 3)

    other = NativeEngine(folder)
    stream = AgentStream(other, rollout, agents_for(rollout), pad_token_id=0)
    stream.start(task_prompts(3))
    running = on_thread(stream.run, 3)
    other.wait(lambda: other.stats.decode_tokens >= 50, timeout=60)
    other.pause()
    snapshot = stream.snapshot()
    assert snapshot is not None
    assert 50 <= int((snapshot.tensors["weight_version"] >= 0).sum()) < int(wanted.tensors["response_mask"].sum())
    snapshot.save_to_disk(str(tmp_path / "snapshot"))
    stream.close()
    running.exception(60)
    snapshot = DataProto.load_from_disk(str(tmp_path / "snapshot"))
    opening = AgentStream(NativeEngine(folder), rollout, agents_for(rollout, NeverOpen(str)), pad_token_id=0)
    opening.start(task_prompts(3), snapshot)
    opening.generate_in_background()
    again = opening.snapshot()  # while the tools are opened
    opening.close()
    assert again is not None
    assert again.tensors["weight_version"].tolist() == snapshot.tensors["weight_version"].tolist()
    resumed = AgentStream(NativeEngine(folder), rollout, agents_for(rollout), pad_token_id=0)
    resumed.start(task_prompts(3), again)
    equal_rows(finished(resumed, 3), wanted)


class NeverOpen(ScriptedTools):
    async def open(self, task: Any, state: Any = None) -> Any:
        await asyncio.Event().wait()


def test_what_has_finished_and_was_not_taken_is_not_sampled_again(folder: Path) -> None:
    """Also where a run goes on with shorter responses: these stay as they are."""
    engine, rollout = NativeEngine(folder), rollout_config()
    stream = AgentStream(engine, rollout, agents_for(rollout), pad_token_id=0)
    stream.start(task_prompts(2))
    stream.run(2)
    snapshot, wanted = stream.snapshot(), stream.take()
    assert snapshot is not None
    assert wanted is not None
    shorter = rollout_config(response_length=4)
    resumed = AgentStream(engine, shorter, agents_for(shorter), pad_token_id=0)
    generated = engine.stats.decode_tokens
    resumed.start(task_prompts(2), snapshot)
    rows = finished(resumed, 2)
    assert engine.stats.decode_tokens == generated
    assert sorted(map(tuple, rows.tensors["responses"].tolist())) == sorted(
        map(tuple, wanted.tensors["responses"].tolist())
    )


def test_faults_of_one_trajectory_touch_no_other_and_are_named(folder: Path) -> None:
    """An engine's refusal, a tool's infrastructure, an exception of a loop: the rows say which."""

    def broken(x: Any) -> str:
        raise InfrastructureError("no sandbox")

    engine, rollout = NativeEngine(folder), rollout_config()
    agents = agents_for(rollout, ScriptedTools(broken))
    stream = AgentStream(engine, rollout, agents, pad_token_id=0)
    stream.start(task_prompts(3))
    batch = finished(stream, 3)
    outcomes = batch.non_tensor_batch["outcome"].tolist()
    assert "infra" in outcomes
    assert set(outcomes) <= {"infra", "finished"}
    assert np.isnan(batch.non_tensor_batch["agent_reward"]).all()
    check_log_probs(batch, {0: tiny_model("llama_tied")})
    prompts = task_prompts(2)
    prompts.non_tensor_batch["agent_name"] = np.array(["nobody", "tool_agent"], dtype=object)
    with pytest.raises(ValueError, match="there is no agent loop 'nobody'"):
        stream.start(prompts)


def test_a_tool_that_blocks_the_event_loop_ends_the_run_as_stalled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_thread, "_TICK_S", 0.02)
    release, rollout = threading.Event(), rollout_config()

    class Blocking(ScriptedTools):
        async def open(self, task: Any, state: Any = None) -> Any:
            release.wait(60)
            return await super().open(task, state)

    agents = agents_for(rollout, Blocking(str), stall_timeout_s=0.1)
    with pytest.raises(StalledError, match=r"(?s)no progress for .* release\.wait"):
        agents.generate(NativeEngine(folder), rollout, task_prompts(1), pad_token_id=0)
    agents.close()  # does not wait for it either
    release.set()
    agents.thread.close()


def test_a_call_that_runs_is_named_with_its_draw(folder: Path) -> None:
    async def waits(x: str) -> str:
        while not may_end.is_set():
            await asyncio.sleep(0.01)
        return x

    may_end = threading.Event()
    engine, rollout = NativeEngine(folder), rollout_config()
    stream = AgentStream(engine, rollout, agents_for(rollout, ScriptedTools(waits)), pad_token_id=0)
    stream.start(task_prompts(3))
    stream.generate_in_background()
    wait_until(lambda: bool(stream.tool_calls()), "a call of a tool")
    (uid, (name, seconds)), *_ = stream.tool_calls().items()
    assert uid in ("draw-0", "draw-1", "draw-2")
    assert name == "look"
    assert 0.0 <= seconds < 60.0
    may_end.set()
    wait_until(lambda: stream.num_running == 0, "all groups")
    assert stream.tool_calls() == {}
    stream.close()


def test_a_trajectory_that_ends_before_its_first_turn_is_a_row_without_a_response(folder: Path) -> None:
    class Closed(ScriptedTools):
        async def open(self, task: Any, state: Any = None) -> Any:
            if task.sample == 1:
                raise KeyError("no such task")
            return await super().open(task, state)

    engine, rollout = NativeEngine(folder), rollout_config()
    stream = AgentStream(engine, rollout, agents_for(rollout, Closed(str)), pad_token_id=0)
    prompts = task_prompts(1)
    ids = np.empty(1, dtype=object)
    ids[0] = [5, 6, 7]
    stream.start(prompts.union(DataProto.from_dict(non_tensors={"raw_prompt_ids": ids})))
    batch = finished(stream, 1)
    assert batch.non_tensor_batch["outcome"].tolist() == ["finished", "finished", "tool_error"]
    assert int(batch.tensors["response_mask"][2].sum()) == 0
    assert batch.tensors["prompts"][2, -3:].tolist() == [5, 6, 7]


def test_a_trajectory_starts_again_where_its_record_is_of_other_tools(folder: Path) -> None:
    """No result of a call that was made before is given to another call."""
    engine, rollout = NativeEngine(folder), rollout_config()
    stream = AgentStream(engine, rollout, agents_for(rollout), pad_token_id=0)
    stream.start(task_prompts(1))
    running = on_thread(stream.run, 1)
    wait_until(lambda: engine.stats.decode_tokens >= 30, "some turns")
    engine.pause()
    snapshot = stream.snapshot()
    stream.close()
    running.exception(60)
    engine.continue_()
    changed = agents_for(rollout, ScriptedTools(lambda x: f"other {x}"))
    streams = [AgentStream(engine, rollout, changed, pad_token_id=0) for _ in range(2)]
    streams[0].start(task_prompts(1), snapshot)
    streams[1].start(task_prompts(1))
    rows, wanted = (finished(stream, 1) for stream in streams)
    equal_rows(rows, wanted)
    assert [events[0]["kind"] for events in rows.non_tensor_batch["events"]] == ["restart"] * len(rows)


def test_trajectories_have_rows_of_their_own_and_their_tools_are_closed_with_the_stream(folder: Path) -> None:
    class Slow(ScriptedTools):
        async def open(self, task: Any, state: Any = None) -> Any:
            task.messages.append({"role": "user", "content": "mine"})
            seen.append(len(task.messages))
            return await super().open(task, state)

        async def close(self) -> None:
            await asyncio.sleep(0.2)
            await super().close()

    seen: list[int] = []
    engine, rollout, tools = NativeEngine(folder), rollout_config(), Slow(str)
    engine.pause()
    stream = AgentStream(engine, rollout, agents_for(rollout, tools), pad_token_id=0)
    stream.start(task_prompts(2))
    stream.generate_in_background()
    wait_until(lambda: stream._stream.num_running == 4, "the first requests of four trajectories")
    tools.num_calls = np.float32(1.0)  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"in the record of a trajectory is no JSON but float32; state\(\) must return"):
        stream.snapshot()
    stream.close()
    assert (seen, tools.num_closed) == ([2, 2, 2, 2], 4)
