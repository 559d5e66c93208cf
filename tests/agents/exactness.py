"""Conversations over a real engine and a tiny model that call tools often, and the trainer's view of what came of them.

For each engine: several turns, results of tools, a forced branch, and a weight update while all of that runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dovetail.agents.calls import CallSettings
from dovetail.agents.chat import ChatRenderer
from dovetail.agents.loops import agent_loop
from dovetail.agents.session import Session, SessionSettings
from dovetail.agents.stream import Agents, AgentStream
from dovetail.agents.tools.functions import FunctionToolbox, tool
from dovetail.agents.types import Task, Toolbox, ToolCall
from dovetail.config.rollout import RolloutConfig
from dovetail.protocol import DataProto
from dovetail.rollout.base import RolloutEngine
from tests.models.tiny import tiny_tokenizer

TURN = 6
"""Most tokens of a turn: a random model hardly ever stops."""


@tool
def look(x: int) -> str:
    """Look at a place.

    Args:
        x: Its number.
    """
    return f"place {x} </s> is not the end"


def frequent_calls(ids: Sequence[int], tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
    """A turn whose last token is even calls `look`."""
    text = tiny_tokenizer().decode([token for token in ids if token < 259], skip_special_tokens=True)
    return text, [ToolCall("look", {"x": int(ids[-1])})] if ids and ids[-1] % 2 == 0 else []


@agent_loop("test_several_turns", replays=True)
async def several_turns(task: Task, session: Session) -> None:
    """Four turns; before the last one the history is compacted. Turns are cut short, and the conversation goes on."""
    messages = list(task.messages)
    for number in range(4):
        turn = await session.chat(messages, tools=session.tools.schemas, max_new_tokens=TURN)
        messages.append(turn.message)
        if turn.calls:
            for result in await session.tools.call_all(turn):
                messages.append({"role": "tool", "content": result.text})
        else:
            messages.append({"role": "user", "content": "go on"})
        session.add_reward(float(number), turn)
        update = UPDATES.pop((task.uid, task.sample, number), None)
        if update is not None:
            await asyncio.to_thread(update)
        if number == 2:
            messages = [task.messages[0], {"role": "user", "content": "in short"}]


UPDATES: dict[tuple[str, int, int], Callable[[], None]] = {}
"""What to do after a turn of a trajectory: (uid, sample, turn)."""


def rollout_config(**changes: Any) -> RolloutConfig:
    from dovetail.config.root import DovetailConfig

    keys = {"prompt_length": 64, "response_length": 300, **changes}
    return DovetailConfig(actor_rollout_ref={"rollout": keys}).actor_rollout_ref.rollout


def agents_for(rollout: RolloutConfig, toolbox: Toolbox | None = None, **changes: Any) -> Agents:
    settings = SessionSettings(
        ChatRenderer(tiny_tokenizer()), frequent_calls, rollout.prompt_length, rollout.response_length
    )
    return Agents(
        settings,
        CallSettings(),
        toolbox or FunctionToolbox([look]),
        **{"default_loop": "test_several_turns", **changes},
    )


def task_prompts(count: int, *, n: int = 2, **meta: Any) -> DataProto:
    messages = np.empty(count, dtype=object)
    for row in range(count):
        messages[row] = [{"role": "user", "content": f"task {row}"}]
    columns = {
        "uid": np.array([f"draw-{row}" for row in range(count)], dtype=object),
        "raw_prompt": messages,
        "sampling_seed": np.arange(100, 100 + count),
    }
    return DataProto.from_dict(non_tensors=columns, meta_info={"n": n, **meta})


def check_log_probs(
    batch: DataProto, models: Mapping[int, Any], *, temperature: float = 1.0, tolerance: float = 1e-5
) -> None:
    """The forward of the model of each sampled token's version, over every row, against the engine's log-probs."""
    columns = batch.tensors
    width = columns["prompts"].shape[1]
    num_compared = 0
    for row in range(len(batch)):
        kept = columns["attention_mask"][row].bool()
        ids = columns["input_ids"][row][kept].long()
        first = int(kept[:width].sum())
        length = len(ids) - first
        sampled = columns["response_mask"][row, :length].bool()
        versions, theirs = columns["weight_version"][row, :length], columns["rollout_log_probs"][row, :length]
        assert (versions[~sampled] == -1).all()
        assert (theirs[~sampled] == 0).all()
        for version, model in models.items():
            with torch.no_grad():
                logits = model(ids[None]).logits[0, first - 1 : -1].double() / temperature
            ours = logits.log_softmax(-1).gather(-1, ids[first:, None]).squeeze(-1).float()
            wrote = sampled & (versions == version)
            num_compared += int(wrote.sum())
            if wrote.any():
                assert float((ours - theirs)[wrote].abs().max()) <= tolerance
    assert num_compared == int(columns["response_mask"].sum())


def check_engine(
    engine: RolloutEngine, models: Mapping[int, Any], update: Callable[[], None], **sampling: float
) -> DataProto:
    """Six trajectories of four turns with an update in the midst: rows, branches, masks and log-probs.

    Log-probs are under the temperature, and before top-p cuts.
    """
    rollout = rollout_config(**sampling)
    stream = AgentStream(engine, rollout, agents_for(rollout), pad_token_id=0)
    UPDATES["draw-1", 0, 1] = update
    stream.start(task_prompts(3))
    stream.run(3)
    batch = stream.take(order=["draw-0", "draw-1", "draw-2"])
    stream.close()
    assert batch is not None
    others, columns = batch.non_tensor_batch, batch.tensors
    assert others["uid"].tolist() == [f"draw-{group}" for group in range(3) for _ in range(4)]
    assert others["segment"].tolist() == [0, 1] * 6
    assert set(others["outcome"]) == {"finished"}
    assert set(others["num_turns"]) == {4}
    # Each sampled token is sampled in one row: four turns of at most TURN tokens.
    counts = columns["response_mask"].sum(dim=1).view(6, 2).sum(dim=1)
    generated = [sum(event["tokens"] for event in events if event["kind"] == "generate") for events in others["events"]]
    assert counts.tolist() == generated[::2]
    assert len(set(columns["weight_version"].unique().tolist())) == 3  # observed tokens, before and after
    assert any(event["kind"] == "tool" for events in others["events"] for event in events)
    assert [len(rewards) for rewards in others["turn_rewards"]] == [3, 1] * 6
    for row, rewards in enumerate(others["turn_rewards"]):
        assert all(columns["response_mask"][row, position] == 1 for position, _ in rewards)
    check_log_probs(batch, models, temperature=rollout.temperature)
    return batch
