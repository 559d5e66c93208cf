"""`AgentStream`: prompts come at any time, groups leave when all their trajectories have ended. Over one engine.

Trajectories are coroutines on one event loop in a thread of
its own; the engine is stepped by the thread that calls `run`, or by one in the background. A weight update concerns
neither. Requests that trajectories make while the engine is not theirs wait, and so do their deadlines.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dovetail.agents.calls import CallSettings
from dovetail.agents.deadlines import Deadline, within
from dovetail.agents.loops import get_loop, replays
from dovetail.agents.rows import rows_of, states_as_rows, states_by_uid, trajectory_from_json, trajectory_to_json
from dovetail.agents.runner import run_trajectory
from dovetail.agents.session import DivergedError, Session, SessionSettings
from dovetail.agents.types import Message, Task, Toolbox, Trajectory
from dovetail.config.rollout import RolloutConfig
from dovetail.protocol import DataProto
from dovetail.rollout.base import GenerationRequest, GenerationResult, RolloutEngine, SamplingParams, derive_seed
from dovetail.rollout.loop_thread import LoopThread
from dovetail.rollout.open_groups import OpenGroups
from dovetail.rollout.request_rules import sampling_params

logger = logging.getLogger(__name__)

_LOOP_S = 120.0
"""How long the event loop may take to answer a call from another thread."""


@dataclass(frozen=True)
class Agents:
    """What all trajectories of a process share. Built once, beside the engine."""

    session: SessionSettings
    calls: CallSettings
    toolbox: Toolbox
    default_loop: str = "tool_agent"
    trajectory_timeout_s: float = 1800.0
    stall_timeout_s: float | None = None
    """How long one function may keep all trajectories waiting. None: for ever."""
    thread: LoopThread = field(default_factory=lambda: LoopThread("agents"))

    def close(self) -> None:
        """The run is over: give back what the tools hold."""
        if self.thread.is_stalled:
            logger.warning("the tools were not closed: a function blocks the thread that does it")
            return
        try:
            self.thread.run(within(self.calls.tool_timeout_s, self.toolbox.close()), _LOOP_S)
        except Exception as error:  # noqa: BLE001 - nothing is left to be done that it could spoil
            logger.warning("the tools did not close: %s: %s", type(error).__name__, error)

    def generate(
        self, engine: RolloutEngine, rollout: RolloutConfig, prompts: DataProto, *, pad_token_id: int
    ) -> DataProto:
        """The rows of these prompts, in their order, once all their trajectories have ended."""
        stream = AgentStream(engine, rollout, self, pad_token_id=pad_token_id)
        try:
            stream.start(prompts)
            stream.run(len(prompts))
            batch = stream.take(order=[str(uid) for uid in prompts.non_tensor_batch["uid"]])
        finally:
            stream.close()
        assert batch is not None, "every group has finished"
        return batch


@dataclass(eq=False)
class _Group:
    uid: str
    tasks: list[Task]
    prompt_ids: list[int]
    loop: str
    sampling: SamplingParams
    ended: dict[int, Trajectory] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    deadlines: dict[int, Deadline] = field(default_factory=dict)
    running: list[asyncio.Task[None]] = field(default_factory=list)
    known: dict[int, Any] = field(default_factory=dict)
    """What a snapshot has of the trajectories that have not ended."""

    @property
    def is_finished(self) -> bool:
        return len(self.ended) == len(self.tasks)


class AgentStream(OpenGroups[_Group, Mapping[int, Any]]):
    """Groups of conversations. What is held is what a snapshot has of a group's trajectories."""

    def __init__(self, engine: RolloutEngine, rollout: RolloutConfig, agents: Agents, *, pad_token_id: int) -> None:
        super().__init__(engine)
        self._rollout = rollout
        self._agents = agents
        self._pad_token_id = pad_token_id
        self._waiting: list[GenerationRequest] = []  # not given to the engine yet
        self._is_open = False  # the engine takes requests
        self._submitting = threading.Lock()  # held while the engine is given requests
        # One thread gives requests to the engine: it may have to wait for a step, which the event loop must not.
        self._submitter = ThreadPoolExecutor(1, "agent-requests")
        self._futures: dict[str, asyncio.Future[GenerationResult]] = {}  # by request id; of the event loop's thread
        self._warned: set[str] = set()

    def start(self, prompts: DataProto, snapshot: DataProto | None = None) -> None:
        """Start `meta_info["n"]` trajectories for each prompt. Rows need a `uid` and messages (`raw_prompt`).

        With a `snapshot`, go on from what it has of these prompts.
        """
        known = states_by_uid(snapshot)
        groups = [_group_of(prompts, row, self._rollout, self._agents) for row in range(len(prompts))]
        self._add(groups, {group.uid: known.get(group.uid, {}) for group in groups})

    def take(self, order: Sequence[str] | None = None) -> DataProto | None:
        """The groups that have finished since the last call, in that order, or in the given one; None: none has."""
        groups = self._take_finished()
        if not groups:
            return None
        if order is not None:
            place = {uid: number for number, uid in enumerate(order)}
            groups.sort(key=lambda group: place[group.uid])
        ended = [(group.prompt_ids, group.ended[index]) for group in groups for index in range(len(group.tasks))]
        batch = rows_of(ended, self._rollout, pad_token_id=self._pad_token_id)
        batch.meta_info["temperature"] = groups[0].sampling.temperature
        return batch

    def tool_calls(self) -> dict[str, tuple[str, float]]:
        with self._changed:
            groups = list(self._groups.values())
        calls: dict[str, tuple[str, float]] = {}
        for group in groups:
            tools = [session.tools for session in list(group.sessions.values()) if session.tools is not None]
            running = [call for checked in tools for call in list(checked.running)]
            if running:
                name, began = min(running, key=lambda call: call[1])
                calls[group.uid] = name, time.time() - began
        return calls

    def snapshot(self) -> DataProto | None:
        """What the groups that were not taken have so far, a row for each trajectory; they go on."""
        partial = {result.request_id: result for result in self._stream.partial()}
        with self._changed:
            self._receive()  # the event loop answers them before it takes the snapshot
        return self._agents.thread.run(self._snapshot(partial), _LOOP_S)

    def close(self) -> None:
        """End what is running. Its tools are closed when this returns: the process may end then."""
        with self._changed:
            running = [task for group in self._groups.values() for task in group.running]
        super().close()
        self._submitter.shutdown(wait=False)
        if running and not self._agents.thread.is_stalled:
            limit_s = self._agents.calls.tool_timeout_s  # of closing a trajectory's tools
            self._agents.thread.run(asyncio.wait(running, timeout=limit_s), limit_s + _LOOP_S)

    # ---- in the thread that generates ----

    def _receive(self) -> bool:
        if self._agents.stall_timeout_s is not None:
            self._agents.thread.refuse_blocked(self._agents.stall_timeout_s)
        return super()._receive()

    def _deliver(self, results: Sequence[GenerationResult]) -> None:
        self._agents.thread.loop.call_soon_threadsafe(self._answer, results)

    def _open(self) -> None:
        self._is_open = True
        self._submitter.submit(self._submit_waiting)
        self._agents.thread.loop.call_soon_threadsafe(self._each_deadline, Deadline.go)

    def _hold(self) -> None:
        with self._submitting:
            self._is_open = False
        self._agents.thread.loop.call_soon_threadsafe(self._each_deadline, Deadline.hold)

    def _submit_waiting(self) -> None:
        with self._submitting:
            if not self._is_open:
                return
            with self._changed:
                requests, self._waiting = self._waiting, []
            try:
                self._submit(requests)
            except Exception as error:  # noqa: BLE001 - raised again in the thread that takes results
                self._fail(error)
        with self._changed:
            self._changed.notify_all()

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        """All together; one that is refused fails alone."""
        if not requests:
            return
        try:
            self._stream.submit(*requests)
        except ValueError as error:
            if len(requests) == 1:
                self._agents.thread.loop.call_soon_threadsafe(self._refuse, requests[0].request_id, error)
                return
            for request in requests:
                self._submit([request])

    # ---- in the event loop's thread ----

    async def _begin_groups(self, groups: Sequence[tuple[_Group, Mapping[int, Any]]]) -> None:
        for group, known in groups:
            for index in range(len(group.tasks)):
                group.known[index] = state = dict(known.get(index, {}))
                if "ended" in state:
                    group.ended[index] = trajectory_from_json(group.known.pop(index)["ended"], group.tasks[index])
                else:
                    group.running.append(asyncio.ensure_future(self._run(group, index)))
            self._note_ended(group)

    async def _run(self, group: _Group, index: int) -> None:
        state = group.known[index]
        task = group.tasks[index] = replace(group.tasks[index], attempt=int(state.get("attempt", 0)))
        session = Session(
            f"{group.uid}/{index}",
            self._agents.session,
            self._ask,
            group.sampling,
            sample_index=index,
            abort=self._abort_request,
            state=state.get("session"),
        )
        if state.get("restarted"):
            session.events.append({"kind": "restart", "turn": None, "attempt": task.attempt})
        group.sessions[index] = session
        group.deadlines[index] = deadline = Deadline(self._agents.trajectory_timeout_s, held=not self._is_open)
        agents = self._agents
        try:
            trajectory = await run_trajectory(
                task,
                get_loop(group.loop),
                session,
                agents.toolbox,
                agents.calls,
                deadline,
                tools_state=state.get("tools"),
            )
        except DivergedError as error:
            self._warn_once("%s (another loop, prompt or set of tools): it, and others like it, start again", error)
            await session.end()
            group.known[index] = {"attempt": task.attempt + 1, "restarted": True}
            await self._run(group, index)
            return
        except Exception as error:  # noqa: BLE001 - raised again in the thread that takes results
            self._fail(error)
            return
        group.ended[index] = trajectory
        del group.sessions[index], group.deadlines[index], group.known[index]
        self._submitter.submit(self._stream.end_session, session.name)
        self._note_ended(group)

    def _note_ended(self, group: _Group) -> None:
        with self._changed:
            self._move_finished([group])

    def _ask(self, request: GenerationRequest) -> asyncio.Future[GenerationResult]:
        self._futures[request.request_id] = future = asyncio.get_running_loop().create_future()
        with self._changed:
            self._waiting.append(request)
            # One that waits already has been announced: whoever comes for it takes all.
            must_announce = self._is_open and not self._ending and len(self._waiting) == 1
        if must_announce:
            self._submitter.submit(self._submit_waiting)
        return future

    def _answer(self, results: Sequence[GenerationResult]) -> None:
        for result in results:
            future = self._futures.pop(result.request_id, None)
            if future is not None and not future.done():
                future.set_result(result)

    def _refuse(self, request_id: str, error: Exception) -> None:
        future = self._futures.pop(request_id, None)
        if future is not None and not future.done():
            future.set_exception(error)

    def _abort_request(self, request_id: str) -> None:
        """End a request with what it has. The engine may wait for a step, which the event loop must not."""
        with self._changed:
            waits = [request for request in self._waiting if request.request_id == request_id]
            self._waiting = [request for request in self._waiting if request.request_id != request_id]
        if waits:
            self._answer([GenerationResult(request_id, waits[0].sample_index, [], [], "abort", [])])
        else:
            self._submitter.submit(self._stream.abort, [request_id])

    def _each_deadline(self, change: Callable[[Deadline], None]) -> None:
        for group in list(self._groups.values()):
            for deadline in group.deadlines.values():
                change(deadline)

    async def _snapshot(self, partial: Mapping[str, GenerationResult]) -> DataProto | None:
        with self._changed:
            groups = [*self._groups.values(), *self._finished]
        rows = [
            (group.uid, index, self._state(group, index, partial))
            for group in groups
            for index in range(len(group.tasks))
        ]
        return states_as_rows(rows)

    def _state(self, group: _Group, index: int, partial: Mapping[str, GenerationResult]) -> dict[str, Any]:
        if group.uid in self._held:
            return dict(self._held[group.uid].get(index, {}))
        if index in group.ended:
            return {"ended": trajectory_to_json(group.ended[index])}
        session, attempt = group.sessions.get(index), group.tasks[index].attempt
        if session is None or session.tools is None:  # not open yet
            return dict(group.known[index])
        tools = session.tools.state()
        if tools is None or not replays(group.loop):
            would = "trajectory %s cannot go on after a resume (%s): it, and others like it, would start again"
            self._warn_once(would, session.name, group.loop)  # a snapshot is taken every few seconds
            return {"attempt": attempt + 1, "restarted": True}
        return {"attempt": attempt, "session": session.state(partial), "tools": tools}

    def _warn_once(self, message: str, *about: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *about)

    # ---- in any thread ----

    def _has_begun(self, group: _Group) -> bool:
        return bool(self._held[group.uid])

    def _begin(self, uids: Sequence[str]) -> None:
        with self._changed:
            groups = [(self._groups[uid], self._held.pop(uid)) for uid in uids if uid in self._held]
        if groups:
            self._agents.thread.run(self._begin_groups(groups), _LOOP_S)

    def _cancel(self, groups: Sequence[_Group]) -> None:
        async def cancel() -> list[str]:
            names = [f"{session.name}/" for group in groups for session in group.sessions.values()]
            for group in groups:
                for task in group.running:
                    task.cancel()
            gone = [name for name in self._futures if any(name.startswith(prefix) for prefix in names)]
            for name in gone:
                self._futures.pop(name).cancel()
            return gone

        if not groups or self._agents.thread.is_stalled:
            return
        gone = set(self._agents.thread.run(cancel(), _LOOP_S))
        with self._changed:
            self._waiting = [request for request in self._waiting if request.request_id not in gone]
        with self._submitting:  # the engine has what no longer waited
            self._stream.abort(gone)


def _group_of(prompts: DataProto, row: int, rollout: RolloutConfig, agents: Agents) -> _Group:
    meta, others = prompts.meta_info, prompts.non_tensor_batch
    columns = {name: column[row] for name, column in others.items() if name not in ("raw_prompt", "raw_prompt_ids")}
    uid, n, validate = str(others["uid"][row]), int(meta.get("n", 1)), bool(meta.get("validate", False))
    sampling = sampling_params(rollout, n=1, validate=validate, greedy=not meta.get("do_sample", True))
    seed = columns.get("sampling_seed")
    seed = derive_seed("agent", uid) if seed is None else int(seed)
    messages = _messages(others, row)
    tasks = [  # each with a row of its own: a loop may append to its messages
        Task(*copy.deepcopy((messages, columns)), uid, sample, seed=derive_seed(seed, sample), validate=validate)
        for sample in range(n)
    ]
    loop = str(columns.get("agent_name") or agents.default_loop)
    get_loop(loop)  # a name that is not known is said at once
    prompt_ids = [int(token) for token in others["raw_prompt_ids"][row]] if "raw_prompt_ids" in others else []
    return _Group(uid, tasks, prompt_ids, loop, replace(sampling, seed=seed))


def _messages(others: Mapping[str, np.ndarray], row: int) -> list[Message]:
    if "raw_prompt" not in others:
        raise ValueError("agents read the column raw_prompt (messages); set data.return_raw_chat=True.")
    prompt = others["raw_prompt"][row]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]
