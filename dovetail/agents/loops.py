"""Who drives a session: one turn, or turns with tools, a simulated user or an environment, or a user's own function.

A loop is `async run(task, session)`; what it returns is the trajectory's reward, or None. Names are verl's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from dovetail.agents.calls import CheckedTools
from dovetail.agents.session import Session, TrajectoryEnd
from dovetail.agents.types import Task, ToolResult
from dovetail.agents.verl.alias import alias_verl
from dovetail.config.user_code import PACKAGE_PREFIX, UserCodeError, load_user_object

AgentLoop: TypeAlias = Callable[[Task, Session], Awaitable[float | None]]
Loop = TypeVar("Loop", bound=Callable[..., Any])

_LOOPS: dict[str, tuple[AgentLoop, bool]] = {}
"""And whether each replays."""


def agent_loop(name: str, *, replays: bool = False) -> Callable[[Loop], Loop]:
    """Register `async run(task, session)`, or a class with such a method, under a name for `agent_name`.

    `replays` says that the loop does the same again when it gets the same turns and results: after a resume it runs
    from its start and is given what was recorded. Others start their trajectories again.
    """

    def register(loop: Loop) -> Loop:
        _LOOPS[name] = as_loop(loop), replays
        return loop

    return register


def get_loop(name: str) -> AgentLoop:
    if name not in _LOOPS:
        raise ValueError(
            f"there is no agent loop {name!r}; there are {', '.join(sorted(_LOOPS))}. Register it with "
            "@agent_loop in a module of trainer.import_modules, or in rollout.agent.agent_loop_config_path."
        )
    return _LOOPS[name][0]


def replays(name: str) -> bool:
    """Whether a trajectory of this loop can go on after a resume."""
    return name in _LOOPS and _LOOPS[name][1]


def load_loops(path: str) -> None:
    """Register the loops of a YAML file: a list of {name, _target_, and arguments}. A target may be a file's.

    `replays: true` says of a loop what it says to `agent_loop`.
    """
    import yaml

    key = "rollout.agent.agent_loop_config_path"
    if not (file := Path(path).expanduser()).is_file():
        raise UserCodeError(f"{key}={path}: there is no such file.")
    for entry in yaml.safe_load(file.read_text()) or ():
        if not isinstance(entry, Mapping) or not {"name", "_target_"} <= entry.keys():
            raise UserCodeError(f"{key}={path}: an entry has no `name` and `_target_`: {entry!r}.")
        arguments = {name: value for name, value in entry.items() if name not in ("name", "_target_", "replays")}
        loop = functools.partial(find_object(entry["_target_"], key=key), **arguments)
        agent_loop(entry["name"], replays=bool(entry.get("replays", False)))(loop)


def find_object(path: str, *, key: str) -> Any:
    """What `package.module.name`, or `file.py:name`, names. `key` is the configuration key, for the messages.

    The code may import verl's base classes: see `dovetail.agents.verl.alias`.
    """
    alias_verl()
    module, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not module:
        raise UserCodeError(f"{key}={path} names no object; write package.module.name, or /path/to/file.py:name.")
    return load_user_object(module if module.endswith(".py") else PACKAGE_PREFIX + module, name, key=key)


def as_loop(loop: Callable[..., Any]) -> AgentLoop:
    """A function as it is; a class, or a partial of one, is built for each trajectory.

    `run(sampling_params, **columns)` is that of a loop written for verl.
    `run(task, base_url, api_key)` gets the address of the trajectory's endpoint instead of the session, and so does a
    class's `run(data, **kwargs)`, which is that of an agent written for AReaL.
    """
    target = loop.func if isinstance(loop, functools.partial) else loop
    if not inspect.isclass(target):
        if "base_url" in inspect.signature(target).parameters:
            from dovetail.agents.endpoint import black_box

            return black_box(loop)
        return loop
    if not hasattr(target, "run"):
        raise ValueError(f"{target.__name__} has no `async run(self, task, session)`; write one.")
    names = inspect.signature(target.run).parameters
    if "sampling_params" in names:  # verl's AgentLoopBase
        from dovetail.agents.verl.run_loop import verl_loop

        return verl_loop(loop)
    if "data" in names and "session" not in names:
        from dovetail.agents.endpoint import data_agent

        return data_agent(loop)
    return lambda task, session: loop().run(task, session)


@agent_loop("single_turn_agent", replays=True)
async def single_turn_agent(task: Task, session: Session) -> float | None:
    """One turn; tools are not called."""
    turn = await session.chat(session.tools.after(task.messages), tools=session.tools.schemas)
    if turn.finish_reason == "length":
        raise TrajectoryEnd("length")
    return None


@agent_loop("tool_agent", replays=True)
async def tool_agent(task: Task, session: Session) -> float | None:
    """Turns until the model calls no tool and nobody responds, until a result says `done`, or until a limit.

    The calls of the last turn that is allowed still run: they may be what the environment grades.
    """
    tools: CheckedTools = session.tools
    messages = tools.after(task.messages)
    num_observed = 0
    while True:
        turn = await session.chat(messages, tools=tools.schemas)
        messages.append(turn.message)
        if turn.finish_reason == "length":
            raise TrajectoryEnd("length")
        if tools.settings.max_user_turns is not None and num_observed >= tools.settings.max_user_turns:
            if turn.calls or tools.responds:
                raise TrajectoryEnd("max_turns")
            return None
        results: list[ToolResult]
        if turn.calls:
            results = await tools.call_all(turn)
            messages += [
                {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result.text}
                for call, result in zip(turn.calls, results, strict=True)
            ]
        else:
            response = await tools.respond(messages, turn)
            if response is None:
                return None
            results = [response]
            messages.append({"role": "user", "content": response.text})
        num_observed += 1
        for result in results:
            if result.reward is not None:
                session.add_reward(result.reward, turn)
        if any(result.done for result in results):
            return None
