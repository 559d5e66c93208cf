"""`Session`: the tree of one trajectory. Whole conversations in, the model's next turn out; ids are only appended.

A node is one turn that the model wrote, with the ids it had before it. A conversation that continues a turn goes on
from that turn's ids; one that rewrites history begins a new segment. Each sampled token is sampled in exactly one
segment. Knows no engine, no tool and no reward function: it is given an async `generate`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from dovetail.agents.chat import Rendered
from dovetail.agents.types import Message, Outcome, Segment, ToolCall, Turn, checked_reward
from dovetail.rollout.assemble import Response
from dovetail.rollout.base import GenerationRequest, GenerationResult, SamplingParams, derive_seed

_ABORT_S = 30.0
"""How long a request that is ended with its trajectory may take to give back what it has."""

Generate = Callable[[GenerationRequest], Awaitable[GenerationResult]]


class TrajectoryEnd(Exception):
    """The conversation cannot go on: no room is left, or no turn. Loops let it pass; the trajectory is graded as is."""

    def __init__(self, outcome: Outcome, reward: float | None = None) -> None:
        super().__init__(outcome)
        self.outcome: Outcome = outcome
        self.reward = reward


class DivergedError(Exception):
    """A trajectory that is run again after a resume asks for other turns than were recorded: it has to start again."""


class RewrittenHistoryError(ValueError):
    """The chat template renders earlier messages differently now, and `multi_turn.on_rewrite=error`."""


class Renderer(Protocol):
    """What a session needs of `ChatRenderer`."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def stop_token_ids(self) -> Sequence[int]: ...

    def start(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        rendered: Rendered | None = None,
    ) -> Sequence[int]: ...

    def extend(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        *,
        closed: bool,
        tools: Sequence[dict[str, Any]] | None = None,
        stop_id: int | None = None,
        rendered: Rendered | None = None,
    ) -> Sequence[int] | None: ...

    def tokens_before(self, ids: Sequence[int], texts: Sequence[str], *, inclusive: bool = False) -> int: ...


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What all sessions of a run have in common."""

    renderer: Renderer
    parse: Callable[[Sequence[int], Sequence[dict[str, Any]]], tuple[str, Sequence[ToolCall]]]
    """Sampled ids, without the stop token, and schemas of the tools to text and tool calls."""
    prompt_length: int
    response_length: int
    """Of a row: the sampled and observed tokens of all turns of a segment."""
    max_turns: int | None = None
    branches: bool = True
    """Whether a template that rewrites history begins a new segment; else it is an error."""
    text_stop_ids: frozenset[int] = frozenset()
    """Ids of `rollout.stop_token_ids` that end a turn as a part of its text. The turn is closed by the template."""
    config: Any = None
    """The run's `DovetailConfig`, for loops that read it: those written for verl."""


@dataclass(slots=True)
class _Node:
    """A turn. `observed` are the ids since the turn before it; without a parent, the whole prompt of a segment."""

    number: int
    parent: int | None
    messages: list[Message]
    """The conversation that was answered."""
    tools: list[dict[str, Any]]
    observed: list[int]
    seed: int | None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    finish_reason: str = "running"
    reward: float | None = None
    is_cut: bool = False
    """Ended without a token that closes it: before a stop string, or with an id that is part of the text."""

    def add(self, result: GenerationResult) -> None:
        self.token_ids += result.token_ids
        self.log_probs += result.log_probs
        self.weight_versions += result.weight_versions
        self.finish_reason = result.finish_reason

    def keep(self, count: int) -> None:
        """As if the engine had stopped there."""
        if count < len(self.token_ids):
            for values in (self.token_ids, self.log_probs, self.weight_versions):
                del values[max(1, count) :]  # a turn is never empty
            self.finish_reason, self.is_cut = "stop", True

    @property
    def is_closed(self) -> bool:
        """Ended by a stop token, which is its last."""
        return self.finish_reason == "stop" and bool(self.token_ids) and not self.is_cut


class Session:
    """One trajectory. `chat` may be called several times at once: sub-agents, samples of the same conversation."""

    def __init__(
        self,
        name: str,
        settings: SessionSettings,
        generate: Generate,
        sampling: SamplingParams,
        *,
        sample_index: int = 0,
        abort: Callable[[str], None] = lambda request_id: None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`sampling.max_new_tokens` is not read: the room that is left limits a turn.

        With `state`, `chat` gives the turns that were recorded as long as it is asked for the same ones; then the
        session goes on.
        """
        self.name = name
        self.tools: Any = None
        """The trajectory's `calls.CheckedTools`."""
        self.events: list[dict[str, Any]] = list((state or {}).get("events", ()))
        self.settings = settings
        self._generate = generate
        self._abort = abort
        self.sampling = replace(sampling, n=1)
        self._sample_index = sample_index
        self._nodes: dict[int, _Node] = {}
        self._turns: dict[int, Turn] = {}
        self._known: dict[int, list[Message]] = {}  # the conversation with each turn; nobody else has these messages
        self._rendered = Rendered()
        self._running: dict[int, tuple[_Node, asyncio.Future[GenerationResult]]] = {}
        self._num_asked = 0
        self._is_over = False
        self._recorded = {node["number"]: _Node(**node) for node in (state or {}).get("nodes", ())}
        self._rows: tuple[Segment, ...] | None = None

    # ---- the conversation ----

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """The model's next turn in this conversation. `messages` are all of it; append `turn.message` to go on.

        A turn ends before any of the texts in `stop`. It is sampled with the run's settings, with which the trainer
        computes its log-probs. Raises `TrajectoryEnd` when no room is left.
        """
        number = self._next_number()
        node = self._next_node(number, messages, list(tools or []))
        if node.finish_reason == "running":
            await self._sample(node, max_new_tokens)
        node.is_cut |= node.is_closed and node.token_ids[-1] in self.settings.text_stop_ids
        if stop:  # also of a recorded turn, which may have been recorded before it was cut
            node.keep(self.settings.renderer.tokens_before(node.token_ids, stop))
        return self._add(node)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        messages: Sequence[Message] = (),
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> Turn:
        """The model's next turn after exactly these ids, for a loop that puts ids together itself.

        Ids that go on from an earlier turn continue it; others begin a segment. `messages` are what a segment begins
        with, for the record. A turn ends after the first of the texts in `stop`. Otherwise as `chat`.
        """
        number = self._next_number()
        node = self._next_node_of_ids(number, list(prompt_ids), messages)
        if node.finish_reason == "running":
            await self._sample(node, max_new_tokens, stop_token_ids)
        if stop:
            node.keep(self.settings.renderer.tokens_before(node.token_ids, stop, inclusive=True))
        return self._add(node)

    def use_rows(self, rows: Sequence[Segment]) -> None:
        """Train on these rows instead of the paths through the tree. Their tokens must be those that were sampled."""
        self._rows = tuple(rows)

    def add_reward(self, reward: float, turn: Turn | None = None) -> None:
        """A reward for a turn; for the last one where none is named. Several add up."""
        if not self._nodes:
            raise ValueError("the session has no turn yet that could have a reward; call chat first.")
        node = self._nodes[max(self._nodes) if turn is None else turn.node]
        node.reward = checked_reward(reward, "the reward of a turn") + (node.reward or 0.0)

    async def end(self) -> None:
        """End the turns that are being written and keep what they have. Nobody gets another one."""
        self._is_over = True
        running, self._running = self._running, {}
        if not running:
            return
        for node, _ in running.values():
            self._abort(self._request_id(node))
        done, _ = await asyncio.wait([future for _, future in running.values()], timeout=_ABORT_S)
        for node, future in running.values():
            if future in done and not future.cancelled() and future.exception() is None:
                node.add(future.result())
                self._nodes[node.number] = node

    # ---- what came of it ----

    @property
    def turns(self) -> list[Turn]:
        return [self._turns[number] for number in sorted(self._turns)]

    @property
    def messages(self) -> list[Message]:
        """The conversation up to the last turn, with it."""
        if not self._nodes:
            return []
        last = self._nodes[max(self._nodes)]
        return [*map(_copied, last.messages), self._as_turn(last).message]

    def segments(self) -> tuple[Segment, ...]:
        """A row for each turn that no other continues: the path to it. What two paths share is sampled in the first."""
        if self._rows is not None:
            return self._rows
        parents = {node.parent for node in self._nodes.values()}
        sampled: set[int] = set()
        return tuple(self._segment(number, sampled) for number in sorted(self._nodes) if number not in parents)

    def result(self, number: int) -> GenerationResult:
        """What the engine gave for this turn."""
        return _result_of(self._nodes[number])

    def matches(self, ids: list[int]) -> dict[int, tuple[int, int]]:
        """The turns that stand in these ids behind exactly what they were sampled after.

        By the number of the turn: where its tokens begin, and how many of them are the same.
        """
        ends: dict[int | None, int] = {None: 0}
        found: dict[int, tuple[int, int]] = {}
        for number, node in sorted(self._nodes.items()):  # parents first
            begin = ends.get(node.parent)
            if begin is None or ids[begin : (at := begin + len(node.observed))] != node.observed:
                continue
            rest = ids[at : at + len(node.token_ids)]
            pairs = enumerate(zip(node.token_ids, rest, strict=False))
            same = next((count for count, (mine, theirs) in pairs if mine != theirs), len(rest))
            found[number] = at, same
            if same == len(node.token_ids):
                ends[number] = at + same
        return found

    def state(self, partial: Mapping[str, GenerationResult]) -> dict[str, Any]:
        """A JSON value to build the session from again; `partial` has what running requests have, by their id."""
        nodes = [self._nodes[number] for number in sorted(self._nodes)]
        for node, future in self._running.values():
            begun = copy.deepcopy(node)
            if future.done() and not future.cancelled() and future.exception() is None:
                begun.add(future.result())
            elif self._request_id(node) in partial:
                begun.add(partial[self._request_id(node)])  # complete where it was not delivered yet
            nodes.append(begun)
        return {"nodes": [asdict(node) for node in [*nodes, *self._recorded.values()]], "events": list(self.events)}

    # ---- inside ----

    def _request_id(self, node: _Node) -> str:
        return f"{self.name}/{node.number}"

    def _next_number(self) -> int:
        if self._is_over:
            raise asyncio.CancelledError("the trajectory is over")
        if self.settings.max_turns is not None and self._num_asked >= self.settings.max_turns:
            raise TrajectoryEnd("max_turns")
        self._num_asked += 1
        return self._num_asked - 1

    def _add(self, node: _Node) -> Turn:
        self._nodes[node.number] = node
        self._turns[node.number] = turn = self._as_turn(node)
        self._known[node.number] = [*node.messages, _copied(turn.message)]
        return turn

    def _next_node(self, number: int, asked: Sequence[Message], tools: list[dict[str, Any]]) -> _Node:
        recorded = self._recorded.pop(number, None)
        if recorded is not None:
            same = len(recorded.messages) == len(asked) and _begins_with(asked, recorded.messages)
            if same and recorded.tools == tools:
                recorded.reward = None  # the loop gives it again
                return recorded
            raise DivergedError(f"turn {number} of {self.name} answers other messages than the recorded one")
        parent = self._continued(asked, tools)
        known = [] if parent is None else self._known[parent.number]
        kept = [mine if mine == theirs else _copied(theirs) for mine, theirs in zip(known, asked, strict=False)]
        messages = [*kept, *map(_copied, asked[len(known) :])]
        observed = None
        if parent is not None:
            closed = parent.is_closed
            observed = self.settings.renderer.extend(
                messages[: len(known)],
                messages[len(known) :],
                closed=closed,
                tools=tools or None,
                stop_id=parent.token_ids[-1] if closed else None,
                rendered=self._rendered,
            )
            if observed is None and not self.settings.branches:
                roles = ", ".join(str(message.get("role")) for message in messages[len(known) :])
                raise RewrittenHistoryError(
                    f"the chat template rewrites history where {roles} follows the model's turn, and "
                    "multi_turn.on_rewrite=error; use branch, or a template that only appends."
                )
        if observed is None:
            if self._nodes or self._running:
                why = "the history is another" if parent is None else "the template rewrites history"
                self.events.append({"kind": "branch", "turn": number, "why": why})
            parent, observed = None, self.settings.renderer.start(messages, tools or None, rendered=self._rendered)
        seed = self._seed(number, None if parent is None else parent.number)
        return _Node(number, None if parent is None else parent.number, messages, tools, list(observed), seed)

    def _next_node_of_ids(self, number: int, ids: list[int], messages: Sequence[Message]) -> _Node:
        recorded = self._recorded.pop(number, None)
        if recorded is not None:
            if recorded.parent in (None, *self._nodes) and self._ids_before(recorded) == ids:
                recorded.reward = None  # the loop gives it again
                return recorded
            raise DivergedError(f"turn {number} of {self.name} answers other ids than the recorded one")
        ends = {
            other: at + same
            for other, (at, same) in self.matches(ids).items()
            if same == len(self._nodes[other].token_ids)
        }
        parent = max(ends, key=lambda other: (ends[other], other), default=None)
        if parent is None and (self._nodes or self._running):
            self.events.append({"kind": "branch", "turn": number, "why": "the ids continue no turn"})
        observed = ids[0 if parent is None else ends[parent] :]
        asked = list(map(_copied, messages)) if parent is None else list(self._known[parent])
        if parent is not None and observed:  # whose role no id tells
            text = self.settings.renderer.tokenizer.decode(observed, skip_special_tokens=True)
            asked.append({"role": "user", "content": text})
        return _Node(number, parent, asked, [], observed, self._seed(number, parent))

    def _ids_before(self, node: _Node) -> list[int]:
        path = self._path(node.parent)
        return [*(token for each in path for token in (*each.observed, *each.token_ids)), *node.observed]

    def _seed(self, number: int, parent: int | None) -> int | None:
        """That of the turn before; another one where two turns would draw the same numbers at the same positions."""
        known = [*self._nodes.values(), *(node for node, _ in self._running.values())]
        seed = self.sampling.seed
        if seed is None or not known:
            return seed
        is_first = parent is not None and all(node.parent != parent for node in known)
        return self._nodes[parent].seed if is_first and parent is not None else derive_seed(seed, "turn", number)

    def _continued(self, asked: Sequence[Message], tools: list[dict[str, Any]]) -> _Node | None:
        """The deepest turn that the conversation goes on from; the latest of several that read the same."""
        best: _Node | None = None
        for number, known in reversed(self._known.items()):  # the last one first: usually no other is deeper
            node = self._nodes[number]
            deeper = best is None or len(node.messages) > len(best.messages)
            if deeper and len(known) < len(asked) and node.tools == tools and _begins_with(asked, known):
                best = node
        return best

    async def _sample(self, node: _Node, max_new_tokens: int | None, stop_token_ids: Sequence[int] = ()) -> None:
        path = [*self._path(node.parent), node]
        ids = [*self._ids_before(node), *node.token_ids]
        room = self.settings.response_length - max(0, len(ids) - self._prompt_length(path[0]))
        if max_new_tokens is not None:
            room = min(room, max_new_tokens - len(node.token_ids))
        if room <= 0:
            if not node.token_ids:
                raise TrajectoryEnd("length")
            node.finish_reason = "length"  # recorded with its last token, before its end was
            return
        request = GenerationRequest(
            self._request_id(node),
            ids,
            replace(
                self.sampling,
                max_new_tokens=room,
                seed=node.seed,
                stop_token_ids=(*self.sampling.stop_token_ids, *stop_token_ids),
            ),
            sample_index=self._sample_index,
            session=self.name,
        )
        began = asyncio.get_running_loop().time()
        future = asyncio.ensure_future(self._generate(request))
        self._running[node.number] = node, future
        # Shielded: a trajectory that ends in mid-turn keeps what the turn has (`end`).
        result = await asyncio.shield(future)
        if self._running.pop(node.number, None) is None:  # a task that outlives the trajectory: `end` has the tokens
            raise asyncio.CancelledError
        node.add(result)
        seconds = asyncio.get_running_loop().time() - began
        self.events.append(
            {"kind": "generate", "turn": node.number, "seconds": seconds, "tokens": len(result.token_ids)}
        )

    def _path(self, number: int | None) -> list[_Node]:
        path: list[_Node] = []
        while number is not None:
            path.append(self._nodes[number])
            number = path[-1].parent
        return path[::-1]

    def _prompt_length(self, root: _Node) -> int:
        """What of a segment's prompt is the row's prompt. A longer one is observed at the start of the response."""
        return min(len(root.observed), self.settings.prompt_length)

    def _as_turn(self, node: _Node) -> Turn:
        ids = node.token_ids
        text, calls = self.settings.parse(ids[:-1] if node.is_closed else ids, node.tools)
        # Nine letters and digits: some templates refuse any other id.
        calls = tuple(replace(call, id=f"call{node.number:03d}{place:02d}") for place, call in enumerate(calls))
        message: Message = {"role": "assistant", "content": text}
        valid = [call for call in calls if call.arguments is not None]
        if valid:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in valid
            ]
        message["content"] += "".join(call.text for call in calls if call.arguments is None)
        before = sum(len(each.observed) + len(each.token_ids) for each in self._path(node.parent))
        num_prompt_tokens = before + len(node.observed)
        return Turn(message, text, calls, node.finish_reason, tuple(ids), node.number, num_prompt_tokens)

    def _segment(self, leaf: int, sampled: set[int]) -> Segment:
        path = self._path(leaf)
        cut = self._prompt_length(path[0])
        prompt, response, rewards = tuple(path[0].observed[:cut]), Response(), []
        for place, node in enumerate(path):
            response = response.with_tokens(node.observed[cut if place == 0 else 0 :])
            if node.number in sampled:
                response = response.with_tokens(node.token_ids)
                continue
            sampled.add(node.number)
            response = response.with_result(_result_of(node))
            if node.reward is not None:
                rewards.append((max(0, len(response.token_ids) - 1), node.reward))
        return Segment(prompt, response, tuple(rewards))


def _begins_with(messages: Sequence[Message], known: Sequence[Message]) -> bool:
    return all(
        mine == theirs or _canonical(mine) == _canonical(theirs) for mine, theirs in zip(known, messages, strict=False)
    )


def _canonical(message: Message) -> tuple[Any, ...]:
    """What two messages must have in common to be the same one: role, text, calls and their arguments."""
    return (
        message.get("role"),
        _text(message.get("content"), stripped=message.get("role") == "assistant"),
        [_call(call) for call in message.get("tool_calls") or ()],
    )


def _copied(message: Message) -> Message:
    return {key: value if isinstance(value, str) else copy.deepcopy(value) for key, value in message.items()}


def _text(content: Any, *, stripped: bool) -> Any:
    """Text as it is; parts that are not text as JSON. What the model wrote may come back without its outer spaces."""
    if isinstance(content, list):
        texts = [
            part.get("text") if part.get("type") == "text" else json.dumps(part, sort_keys=True) for part in content
        ]
        content = "".join(text or "" for text in texts)
    content = content or ""
    return content.strip() if stripped else content


def _call(call: Mapping[str, Any]) -> Any:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return function.get("name"), arguments


def _result_of(node: _Node) -> GenerationResult:
    reason: Any = node.finish_reason
    return GenerationResult("", 0, node.token_ids, node.log_probs, reason, node.weight_versions)
