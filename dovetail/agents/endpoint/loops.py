"""Agents that are black boxes: a function of an address and a key, or a program. Both are loops of a session."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from dovetail.agents.endpoint.openai import completion_id
from dovetail.agents.endpoint.server import Endpoint, OpenSession
from dovetail.agents.loops import AgentLoop
from dovetail.agents.session import Session, TrajectoryEnd
from dovetail.agents.types import InfrastructureError, Task
from dovetail.config.signatures import named_arguments

Reward: TypeAlias = float | Mapping[str, float] | None
"""Of the trajectory, or of turns by the ids of their completions."""
BlackBox = Callable[[Task, str, str], Awaitable[Reward]]
_SHOWN_OUTPUT = 2000
_LONGEST_VARIABLE = 128 * 1024  # bytes of one variable with its name and its end: Linux takes no more


def black_box(run: BlackBox, *, idle_timeout_s: float = 600.0) -> AgentLoop:
    """A loop from `async run(task, base_url, api_key)`; what it returns, or posts to `finish`, is the reward."""

    async def loop(task: Task, session: Session) -> float | None:
        return await _drive(session, lambda opened: run(task, opened.base_url, opened.api_key), idle_timeout_s)

    return loop


def data_agent(build: Callable[[], Any]) -> AgentLoop:
    """A loop from a class with `async run(data, base_url, api_key, http_client)`, as AReaL has them. `data` is the row
    with its messages; one agent is built for each trajectory."""

    async def run(task: Task, base_url: str, api_key: str) -> Reward:
        agent, data = build(), {**task.row, "messages": task.messages}
        given = {"data": data, "base_url": base_url, "api_key": api_key, "http_client": None}
        return await agent.run(**named_arguments(agent.run, given))

    return black_box(run)


def command_agent(command: str, *, idle_timeout_s: float = 600.0) -> AgentLoop:
    """A loop from a program. In its environment it finds OPENAI_BASE_URL and OPENAI_API_KEY, the same two of ANTHROPIC,
    and DOVETAIL_TASK: the JSON that is on its standard input too, where a longer task than a variable takes is only.

    It may post its reward to DOVETAIL_FINISH_URL. Code 0 is a good end; another one is an error of the agent. What it
    started in its process group is killed when it ends.
    """

    async def loop(task: Task, session: Session) -> float | None:
        return await _drive(session, lambda opened: _run_program(command, task, opened), idle_timeout_s)

    return loop


async def _drive(
    session: Session, run: Callable[[OpenSession], Awaitable[Reward]], idle_timeout_s: float
) -> float | None:
    async with Endpoint.of_loop().open(session, idle_timeout_s=idle_timeout_s) as opened:
        work = asyncio.ensure_future(run(opened))
        try:
            # Limits: the deadline of the trajectory, which cancels this, and the endpoint's of an idle session.
            await asyncio.wait({work, opened.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not opened.ended.done():
                return _added_to_turns(work.result(), opened)
            finish = opened.ended.result()
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work
    if finish.outcome == "infra":
        raise InfrastructureError("the agent posted that what is around it failed")
    if finish.outcome == "tool_error":
        raise RuntimeError("the agent posted that its own code failed")
    if finish.outcome != "finished":
        raise TrajectoryEnd(finish.outcome, finish.reward)
    return finish.reward


def _added_to_turns(reward: Reward, opened: OpenSession) -> float | None:
    """What is left for the trajectory as a whole."""
    if not isinstance(reward, Mapping):
        return reward
    turns = {completion_id(opened.name, turn): turn for turn in opened.session.turns}
    if unknown := sorted(reward.keys() - turns):
        known = ", ".join(turns) or "none, as no turn was asked for"
        raise ValueError(f"the agent returned a reward for {unknown[0]}, the id of no completion; there are: {known}.")
    for name, value in reward.items():
        opened.session.add_reward(value, turns[name])
    return 0.0 if reward else None


def _plain(value: Any) -> Any:
    """Columns are numpy's: a number stays one."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


async def _run_program(command: str, task: Task, opened: OpenSession) -> float | None:
    row: dict[str, Any] = {"messages": task.messages, "row": dict(task.row), "uid": task.uid, "sample": task.sample}
    sent = json.dumps({**row, "seed": task.seed, "validate": task.validate}, default=_plain)
    fits = len(f"DOVETAIL_TASK={sent}".encode()) < _LONGEST_VARIABLE
    near = f"{os.environ.get('no_proxy') or os.environ.get('NO_PROXY') or 'localhost'},127.0.0.1"
    environment = {
        **os.environ,
        "NO_PROXY": near,  # clients would ask a cluster's proxy for the endpoint
        "no_proxy": near,
        "OPENAI_BASE_URL": opened.base_url,
        "OPENAI_API_KEY": opened.api_key,
        "ANTHROPIC_BASE_URL": opened.url,
        "ANTHROPIC_API_KEY": opened.api_key,
        "DOVETAIL_FINISH_URL": f"{opened.url}/finish",
        **({"DOVETAIL_TASK": sent} if fits else {}),
    }
    # Files and no pipes: a child that outlives the program would hold a pipe open, and its end would not be seen.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as task_file:
        task_file.write(sent.encode())
        task_file.seek(0)
        try:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(command),
                env=environment,
                stdin=task_file,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(f"agent.command={command} does not start: {error}") from error
        try:
            code = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if code != 0:
            output.seek(max(0, os.fstat(output.fileno()).st_size - _SHOWN_OUTPUT))
            tail = output.read(_SHOWN_OUTPUT).decode(errors="replace").strip()
            long = (
                "" if fits else f" Its task of {len(sent)} bytes is on standard input only, too long for DOVETAIL_TASK."
            )
            raise RuntimeError(f"agent.command ended with code {code}: {tail}{long}")
    return None
