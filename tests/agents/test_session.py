"""The tree of one trajectory: what continues, what branches, and that each sampled token is sampled in one row."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from dovetail.agents.session import DivergedError, RewrittenHistoryError, Session, TrajectoryEnd
from dovetail.agents.types import Message
from tests.agents.fakes import ROLES, STOP, FakeEngine, FakeRenderer, in_virtual_time, session_over

pytestmark = pytest.mark.unit

USER: Message = {"role": "user", "content": "hi"}
AGAIN: Message = {"role": "user", "content": "more"}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text}


def sampled_tokens(session: Session) -> int:
    return sum(sum(segment.response.sampled) for segment in session.segments())


def talk(session: Session, *messages: list[Message]) -> list[Any]:
    async def turns() -> list[Any]:
        return [await session.chat(conversation) for conversation in messages]

    return in_virtual_time(turns())[0]


async def conversation(session: Session, *observations: Message) -> list[Message]:
    messages = [USER]
    for observation in (*observations, None):
        messages.append((await session.chat(messages)).message)
        if observation is not None:
            messages.append(observation)
    return messages


def test_the_prompt_of_a_turn_begins_with_all_that_was_read_and_sampled_before_it() -> None:
    engine = FakeEngine("one", "two", "three")
    session = session_over(engine)
    in_virtual_time(conversation(session, tool("a"), tool("b")))
    first, second, third = (list(request.prompt_token_ids) for request in engine.requests)
    assert second[: len(first) + 4] == [*first, *map(ord, "one"), STOP]
    assert third[: len(second) + 4] == [*second, *map(ord, "two"), STOP]
    (segment,) = session.segments()
    assert segment.prompt_ids == tuple(first)
    row = segment.response
    assert [*segment.prompt_ids, *row.token_ids] == [*third, *map(ord, "three"), STOP]
    observed = [i for i, sampled in enumerate(row.sampled) if not sampled]
    assert {row.log_probs[i] for i in observed} == {0.0}
    assert {row.weight_versions[i] for i in observed} == {-1}
    assert sum(row.sampled) == len("one") + len("two") + len("three") + 3
    assert {(request.session, request.sample_index) for request in engine.requests} == {("s", 3)}
    assert {request.sampling.seed for request in engine.requests} == {7}
    assert engine.requests[0].sampling.stop_token_ids == (STOP,)


def test_a_message_is_the_same_one_whatever_its_ids_and_the_order_of_its_keys() -> None:
    engine = FakeEngine("!look here", "done")
    session = session_over(engine)
    (turn,) = talk(session, [USER])
    assert turn.message["tool_calls"][0]["function"] == {"name": "look", "arguments": {"x": "here"}}
    echoed = {
        "tool_calls": [{"function": {"arguments": json.dumps({"x": "here"}), "name": "look"}, "id": "other"}],
        "content": [{"type": "text", "text": " "}],
        "role": "assistant",
    }
    talk(session, [USER, echoed, tool("found")])
    assert len(session.segments()) == 1


def test_a_message_that_was_changed_in_place_is_another_one() -> None:
    parts: Message = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    session = session_over(FakeEngine("one", "two", "three"), renderer=_PartsRenderer())

    async def turns() -> None:
        messages = [parts, (await session.chat([parts])).message, AGAIN]
        messages[1]["content"] = "not what was sampled"
        messages += [(await session.chat(messages)).message, AGAIN]
        parts["content"].append({"type": "text", "text": " there"})
        await session.chat(messages)

    in_virtual_time(turns())
    assert [event["turn"] for event in session.events if event["kind"] == "branch"] == [1, 2]


class _PartsRenderer(FakeRenderer):
    def _render(self, messages: Any) -> list[int]:
        return super()._render([{**message, "content": str(message["content"])} for message in messages])


def test_a_turn_cut_by_its_limit_is_closed_by_an_observed_stop_token() -> None:
    engine = FakeEngine("long", "x")
    session = session_over(engine)

    async def run() -> None:
        turn = await session.chat([USER], max_new_tokens=2)
        assert turn.finish_reason == "length"
        assert turn.text == "lo"
        await session.chat([USER, turn.message, AGAIN])

    in_virtual_time(run())
    row = session.segments()[0].response
    assert row.token_ids[:3] == (ord("l"), ord("o"), STOP)
    assert row.sampled[:3] == (True, True, False)


def test_rewritten_history_begins_a_segment_in_which_old_turns_are_observed() -> None:
    engine = FakeEngine("one", "two", "three")
    session = session_over(engine, renderer=FakeRenderer(rewrites=("user",)))
    in_virtual_time(conversation(session, tool("a"), AGAIN))
    first, second = session.segments()
    assert sum(first.response.sampled) == 8
    assert all(second.response.sampled)
    assert second.response.token_ids == (*map(ord, "three"), STOP)
    assert [event["why"] for event in session.events if event["kind"] == "branch"] == ["the template rewrites history"]
    strict = session_over(FakeEngine("one"), renderer=FakeRenderer(rewrites=("user",)), branches=False)
    with pytest.raises(RewrittenHistoryError, match="user follows"):
        in_virtual_time(conversation(strict, AGAIN))


def test_each_sampled_token_is_sampled_in_one_row_over_all_branches() -> None:
    """A tree: two turns, a retry of the second, a compaction, a sub-agent with a conversation of its own."""
    engine = FakeEngine(by=lambda request: f"turn {request.request_id}")
    session = session_over(engine, response_length=1000, prompt_length=1000)

    async def run() -> None:
        one = await session.chat([USER])
        after = [USER, one.message, tool("a")]
        two, retry = await asyncio.gather(session.chat(after), session.chat(after))
        await session.chat([*after, two.message, AGAIN])
        await session.chat([*after, retry.message, AGAIN])
        await session.chat([{"role": "user", "content": "summary"}, AGAIN])
        await session.chat([{"role": "system", "content": "helper"}, USER])

    in_virtual_time(run())
    assert len(session.segments()) == 4
    assert sampled_tokens(session) == sum(len(f"turn s/{number}") + 1 for number in range(7))
    shared = session.segments()[1].response
    assert not any(shared.sampled[: len("turn s/0") + 1])
    # Turns that stand at the same positions must not draw the same numbers.
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[0] == seeds[1] == seeds[3]
    assert len({*seeds[1:3], *seeds[5:]}) == 4
    assert seeds[2] == seeds[4]


def test_rewards_of_turns_stand_at_their_last_sampled_token() -> None:
    session = session_over(FakeEngine("one", "two"))

    async def run() -> None:
        first = await session.chat([USER])
        await session.chat([USER, first.message, tool("a")])
        session.add_reward(1.0, first)
        session.add_reward(0.5, first)
        session.add_reward(-1.0)

    in_virtual_time(run())
    (segment,) = session.segments()
    assert segment.turn_rewards == ((3, 1.5), (len(segment.response.token_ids) - 1, -1.0))


def test_the_room_of_a_row_ends_the_trajectory() -> None:
    engine = FakeEngine("0123456789", "0123456789")
    session = session_over(engine, response_length=17)
    with pytest.raises(TrajectoryEnd, match="length"):
        in_virtual_time(conversation(session, tool("a"), tool("b")))
    assert [request.sampling.max_new_tokens for request in engine.requests] == [17, 2]
    assert len(session.segments()[0].response.token_ids) == 17


def test_a_prompt_that_is_too_long_is_observed_at_the_start_of_the_response() -> None:
    session = session_over(FakeEngine("x"), prompt_length=3, response_length=5)
    talk(session, [USER])
    (segment,) = session.segments()
    assert segment.prompt_ids == (ROLES["user"], ord("h"), ord("i"))
    assert segment.response.token_ids == (STOP, ROLES["assistant"], ord("x"), STOP)
    assert segment.response.sampled == (False, False, True, True)


def test_the_most_turns() -> None:
    session = session_over(FakeEngine("one", "two", "three"), max_turns=2)
    with pytest.raises(TrajectoryEnd, match="max_turns"):
        in_virtual_time(conversation(session, tool("a"), tool("b")))


def test_a_turn_that_is_ended_keeps_its_tokens() -> None:
    session = session_over(FakeEngine("hello", seconds=100.0))

    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await session.chat([USER])
        await session.end()

    _, seconds = in_virtual_time(run())
    assert seconds == pytest.approx(5.0)
    assert session.segments()[0].response.token_ids == (ord("h"),)


def test_a_task_that_outlives_its_trajectory_adds_nothing_to_it() -> None:
    """Its turn is ended with the trajectory, whose row has the tokens once; another turn is not begun."""
    engine = FakeEngine("hello", seconds=100.0)
    session = session_over(engine)

    async def run() -> None:
        left = asyncio.ensure_future(session.chat([USER]))
        await asyncio.sleep(5)
        await session.end()
        with pytest.raises(asyncio.CancelledError):
            await left
        with pytest.raises(asyncio.CancelledError):
            await session.chat([USER])

    in_virtual_time(run())
    assert session.segments()[0].response.token_ids == (ord("h"),)
    assert len(engine.requests) == 1


def test_a_restored_session_gives_recorded_turns_and_goes_on_with_the_unfinished_one() -> None:
    engine = FakeEngine("one", "two", seconds=10.0)
    session = session_over(engine)

    async def interrupted() -> Any:
        task = asyncio.ensure_future(conversation(session, tool("a")))
        await asyncio.sleep(15)
        last = engine.requests[-1]
        begun = {last.request_id: replace(await FakeEngine("t").generate(last), finish_reason="running")}
        begun[last.request_id].token_ids.pop()
        begun[last.request_id].log_probs.pop()
        begun[last.request_id].weight_versions.pop()
        task.cancel()
        return session.state(begun)

    state = json.loads(json.dumps(in_virtual_time(interrupted())[0]))
    resumed_engine = FakeEngine("wo")
    resumed = session_over(resumed_engine, state=state)
    in_virtual_time(conversation(resumed, tool("a")))
    whole = session_over(FakeEngine("one", "two"))
    in_virtual_time(conversation(whole, tool("a")))
    assert resumed.segments() == whole.segments()
    (request,) = resumed_engine.requests
    assert list(request.prompt_token_ids) == [*engine.requests[-1].prompt_token_ids, ord("t")]
    assert request.sampling.seed == 7


@pytest.mark.parametrize("delivered", [True, False])
def test_a_turn_that_was_complete_when_it_was_recorded_is_not_gone_on_with_and_ends_at_its_stop_text(
    delivered: bool,
) -> None:
    engine = FakeEngine("one. Two", seconds=10.0)
    session = session_over(engine)

    async def interrupted() -> Any:
        task = asyncio.ensure_future(session.chat([USER], stop=[". "]))
        await asyncio.sleep(5)
        (request,) = engine.requests
        result = await FakeEngine("one. Two").generate(request)
        if delivered:
            ((_, future),) = session._running.values()
            future.cancel()
            done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            done.set_result(result)
            session._running[0] = session._running[0][0], done
        task.cancel()
        return session.state({} if delivered else {request.request_id: result})

    state = json.loads(json.dumps(in_virtual_time(interrupted())[0]))
    resumed = session_over(FakeEngine(), state=state)
    turn = in_virtual_time(resumed.chat([USER], stop=[". "]))[0]
    assert (turn.text, turn.finish_reason) == ("one", "stop")


def test_a_loop_that_asks_for_something_else_after_a_restore_has_to_start_again() -> None:
    session = session_over(FakeEngine("one", "two"))
    in_virtual_time(conversation(session, tool("a")))
    resumed = session_over(FakeEngine("2", "3"), state=session.state({}))
    with pytest.raises(DivergedError, match="turn 1 of s answers other messages"):
        in_virtual_time(conversation(resumed, tool("other")))


async def test_ids_continue_the_longest_path_that_they_begin_with() -> None:
    engine = FakeEngine("ab", "c", "d", "e")
    session = session_over(engine)
    first = await session.generate([5, 6], messages=[{"role": "user", "content": "q"}])
    _, right = [await session.generate([5, 6, *first.token_ids, ord(mark)]) for mark in "xy"]
    other = await session.generate([5, 6, ord("a"), ord("z")])  # not what was sampled: another row
    assert [node.prompt_token_ids for node in engine.requests][-1] == [5, 6, ord("a"), ord("z")]
    assert [segment.prompt_ids for segment in session.segments()] == [(5, 6), (5, 6), (5, 6, ord("a"), ord("z"))]
    assert sum(sum(segment.response.sampled) for segment in session.segments()) == 3 + 2 + 2 + 2
    assert [event["turn"] for event in session.events if event["kind"] == "branch"] == [3]
    whole = [5, 6, *first.token_ids, ord("y"), *right.token_ids]
    assert session.tree.matches(whole) == {first.node: (2, 3), right.node: (6, 2)}
    assert session.tree.matches([5, 6, ord("a"), ord("z")]) == {first.node: (2, 1), other.node: (4, 0)}
    assert [message["content"] for message in session._known[right.node]] == ["q", "ab", "y", "d"]


async def test_recorded_ids_are_given_again_and_other_ones_begin_anew() -> None:
    session = session_over(FakeEngine("ab", "cd"))
    first = await session.generate([5])
    second = await session.generate([5, *first.token_ids, 9], stop=["c"])
    state = json.loads(json.dumps(session.state({})))
    again = session_over(FakeEngine(), state=state)
    assert (await again.generate([5])).token_ids == first.token_ids
    assert (await again.generate([5, *first.token_ids, 9], stop=["c"])).token_ids == second.token_ids == (ord("c"),)
    assert again.segments() == session.segments()
    for asked in ([5, 5], [6]):
        changed = session_over(FakeEngine(), state=state)
        with pytest.raises(DivergedError, match="turn 0 of s answers other ids"):
            await changed.generate(asked)
    ahead = session_over(FakeEngine("ab"), state={**state, "nodes": state["nodes"][1:]})
    await ahead.generate([5])
    with pytest.raises(DivergedError, match="turn 1"):
        await ahead.generate([5, 9])
