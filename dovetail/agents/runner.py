"""Run one trajectory to its end: its deadline, and which of the outcomes it has. Whatever it raises stays inside."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from pathlib import Path
from typing import Any

from dovetail.agents.calls import CallSettings, CheckedTools
from dovetail.agents.deadlines import Deadline, DeadlineError, until
from dovetail.agents.loops import AgentLoop
from dovetail.agents.session import DivergedError, RewrittenHistoryError, Session, TrajectoryEnd
from dovetail.agents.types import GRADED, InfrastructureError, Outcome, Task, Toolbox, Trajectory, checked_reward
from dovetail.rollout.base import EngineError

logger = logging.getLogger(__name__)

FATAL = (EngineError, RewrittenHistoryError, DivergedError)
"""What is not the outcome of a trajectory: it concerns the whole run, or the trajectory starts again."""
_LEADING = (str(Path(__file__).parent), contextlib.__file__, asyncio.__path__[0])
"""Where the frames are that lead to the user's code."""
_NO_REQUEST = "the agent ended and has not asked the model for a turn (at OPENAI_BASE_URL, or with session.chat)."
_REPORTED: set[tuple[Any, ...]] = set()


async def run_trajectory(
    task: Task,
    loop: AgentLoop,
    session: Session,
    toolbox: Toolbox,
    settings: CallSettings,
    deadline: Deadline,
    *,
    tools_state: Any = None,
) -> Trajectory:
    """Drive the session to its end. Raises what concerns the whole run only; when cancelled, its tools are closed."""
    outcome: Outcome = "finished"
    error, reward = "", None

    async def drive() -> float | None:
        session.tools = await CheckedTools.open(toolbox, task, session, settings, tools_state)
        return await loop(task, session)

    try:
        try:
            returned = await until(deadline, asyncio.ensure_future(drive()))
            reward = None if returned is None else checked_reward(returned, "the reward that the agent loop returned")
        except TrajectoryEnd as end:
            outcome, reward = end.outcome, end.reward
        except DeadlineError:
            outcome = "time_limit"
        except FATAL:
            raise
        except Exception as failure:  # noqa: BLE001 - it may be the user's code
            outcome, error = _outcome_of(failure, session.name)
        await session.end()
        if outcome == "finished" and reward is None and not session.segments():
            outcome, error = "tool_error", _NO_REQUEST
        if outcome in GRADED and reward is None and session.tools is not None:
            try:
                reward = await session.tools.reward()
            except Exception as failure:  # noqa: BLE001 - as above
                outcome, error = _outcome_of(failure, session.name)
    finally:
        deadline.hold()
        await _close(session)
    if error:
        session.events.append({"kind": "error", "turn": None, "failure": outcome, "result": error})
    return Trajectory(
        task,
        session.segments(),
        outcome,
        reward,
        tuple(session.messages),
        tuple(session.events),
        error,
        len(session.turns),
    )


def _outcome_of(failure: Exception, name: str) -> tuple[Outcome, str]:
    if isinstance(failure, InfrastructureError):
        return "infra", str(failure)
    _report(name, failure)
    return "tool_error", f"{type(failure).__name__}: {failure}"


def _report(name: str, failure: Exception) -> None:
    """Log the part of the traceback that is the user's, once for each place: a batch may fail as a whole."""
    place = (type(failure), *traceback.extract_tb(failure.__traceback__)[-1][:2])
    if place in _REPORTED:
        return
    _REPORTED.add(place)
    frame = failure.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_LEADING):
        frame = frame.tb_next
    shown = "".join(traceback.format_exception(type(failure), failure, frame)).strip()
    logger.warning("trajectory %s ended with an exception (shown once; others are counted):\n%s", name, shown)


async def _close(session: Session) -> None:
    if session.tools is None:
        return
    try:
        await session.tools.close()
    except Exception as error:  # noqa: BLE001 - the trajectory is over; a tool that does not close changes nothing
        logger.warning("the tools of trajectory %s did not close: %s: %s", session.name, type(error).__name__, error)
