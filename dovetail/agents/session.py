"""`Session`: one trajectory. Whole conversations in, the model's next turn out; ids are only appended.

A conversation that continues a turn goes on from that turn's ids; one that rewrites history begins a new segment. Each
sampled token is sampled in exactly one segment. Knows no engine, no tool and no reward function: it is given an async
`generate`. The turns with their ids are a `TurnTree`.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dovetail.agents.chat import ChatRenderer, Rendered
from dovetail.agents.messages import begins_with, copied
from dovetail.agents.turn_tree import Node, TurnTree
from dovetail.agents.types import Message, Outcome, Segment, ToolCall, Turn, checked_reward
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


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What all sessions of a run have in common."""

    renderer: ChatRenderer
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
        self.tree = TurnTree()
        self._turns: dict[int, Turn] = {}
        self._known: dict[int, list[Message]] = {}  # the conversation with each turn; nobody else has these messages
        self._rendered = Rendered()
        self._running: dict[int, tuple[Node, asyncio.Future[GenerationResult]]] = {}
        self._num_asked = 0
        self._is_over = False
        self._recorded = {node["number"]: Node(**node) for node in (state or {}).get("nodes", ())}
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
        node = self._next_node(self._next_number(), messages, list(tools or []))
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
        node = self._next_node_of_ids(self._next_number(), list(prompt_ids), messages)
        await self._sample(node, max_new_tokens, stop_token_ids)
        if stop:
            node.keep(self.settings.renderer.tokens_before(node.token_ids, stop, inclusive=True))
        return self._add(node)

    def use_rows(self, rows: Sequence[Segment]) -> None:
        """Train on these rows instead of the paths through the tree. Their tokens must be those that were sampled."""
        self._rows = tuple(rows)

    def add_reward(self, reward: float, turn: Turn | None = None) -> None:
        """A reward for a turn; for the last one where none is named. Several add up."""
        if not self.tree:
            raise ValueError("the session has no turn yet that could have a reward; call chat first.")
        node = self.tree[max(self.tree) if turn is None else turn.node]
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
            if future in done and _has_result(future):
                node.add(future.result())
                self.tree[node.number] = node

    # ---- what came of it ----

    @property
    def turns(self) -> list[Turn]:
        return [self._turns[number] for number in sorted(self._turns)]

    @property
    def messages(self) -> list[Message]:
        """The conversation up to the last turn, with it."""
        if not self.tree:
            return []
        last = self.tree[max(self.tree)]
        return [*map(copied, last.messages), self._as_turn(last).message]

    def segments(self) -> tuple[Segment, ...]:
        """The rows: those of `use_rows`, else a row for each turn that no other continues."""
        return self.tree.segments(self.settings.prompt_length) if self._rows is None else self._rows

    def state(self, partial: Mapping[str, GenerationResult]) -> dict[str, Any]:
        """A JSON value to build the session from again; `partial` has what running requests have, by their id."""
        nodes = self.tree.in_order
        for node, future in self._running.values():
            begun = copy.deepcopy(node)
            if future.done() and _has_result(future):
                begun.add(future.result())
            elif self._request_id(node) in partial:
                begun.add(partial[self._request_id(node)])  # complete where it was not delivered yet
            nodes.append(begun)
        return {"nodes": [asdict(node) for node in [*nodes, *self._recorded.values()]], "events": list(self.events)}

    # ---- inside ----

    def _request_id(self, node: Node) -> str:
        return f"{self.name}/{node.number}"

    def _next_number(self) -> int:
        if self._is_over:
            raise asyncio.CancelledError("the trajectory is over")
        if self.settings.max_turns is not None and self._num_asked >= self.settings.max_turns:
            raise TrajectoryEnd("max_turns")
        self._num_asked += 1
        return self._num_asked - 1

    def _add(self, node: Node) -> Turn:
        self.tree[node.number] = node
        self._turns[node.number] = turn = self._as_turn(node)
        self._known[node.number] = [*node.messages, copied(turn.message)]
        return turn

    def _next_node(self, number: int, asked: Sequence[Message], tools: list[dict[str, Any]]) -> Node:
        def is_same(node: Node) -> bool:
            return len(node.messages) == len(asked) and begins_with(asked, node.messages) and node.tools == tools

        if (recorded := self._take_recorded(number, is_same, "messages")) is not None:
            return recorded
        parent = self._continued(asked, tools)
        known = [] if parent is None else self._known[parent.number]
        kept = [mine if mine == theirs else copied(theirs) for mine, theirs in zip(known, asked, strict=False)]
        messages = [*kept, *map(copied, asked[len(known) :])]
        if parent is not None:
            stop_id = parent.token_ids[-1] if parent.is_closed else None
            observed = self.settings.renderer.extend(
                messages[: len(known)],
                messages[len(known) :],
                closed=parent.is_closed,
                tools=tools or None,
                stop_id=stop_id,
                rendered=self._rendered,
            )
            if observed is not None:
                return Node(number, parent.number, messages, tools, observed, self._seed(number, parent))
            if not self.settings.branches:
                roles = ", ".join(str(message.get("role")) for message in messages[len(known) :])
                raise RewrittenHistoryError(
                    f"the chat template rewrites history where {roles} follows the model's turn, and "
                    "multi_turn.on_rewrite=error; use branch, or a template that only appends."
                )
        self._note_branch(number, "the history is another" if parent is None else "the template rewrites history")
        observed = self.settings.renderer.start(messages, tools or None, rendered=self._rendered)
        return Node(number, None, messages, tools, observed, self._seed(number, None))

    def _next_node_of_ids(self, number: int, ids: list[int], messages: Sequence[Message]) -> Node:
        def is_same(node: Node) -> bool:
            return node.parent in (None, *self.tree) and self.tree.ids_before(node) == ids

        if (recorded := self._take_recorded(number, is_same, "ids")) is not None:
            return recorded
        matches = self.tree.matches(ids).items()
        ends = {other: at + same for other, (at, same) in matches if same == len(self.tree[other].token_ids)}
        if not ends:
            self._note_branch(number, "the ids continue no turn")
            return Node(number, None, list(map(copied, messages)), [], ids, self._seed(number, None))
        parent = self.tree[max(ends, key=lambda other: (ends[other], other))]
        asked, observed = list(self._known[parent.number]), ids[ends[parent.number] :]
        if observed:  # whose role no id tells
            text = self.settings.renderer.tokenizer.decode(observed, skip_special_tokens=True)
            asked.append({"role": "user", "content": text})
        return Node(number, parent.number, asked, [], observed, self._seed(number, parent))

    def _take_recorded(self, number: int, is_same: Callable[[Node], bool], what: str) -> Node | None:
        """The turn that was recorded under this number, if any; it must answer the same."""
        recorded = self._recorded.pop(number, None)
        if recorded is not None:
            if not is_same(recorded):
                raise DivergedError(f"turn {number} of {self.name} answers other {what} than the recorded one")
            recorded.reward = None  # the loop gives it again
        return recorded

    def _note_branch(self, number: int, why: str) -> None:
        if self.tree or self._running:
            self.events.append({"kind": "branch", "turn": number, "why": why})

    def _seed(self, number: int, parent: Node | None) -> int | None:
        """That of the turn before; another one where two turns would draw the same numbers at the same positions."""
        known = [*self.tree.values(), *(node for node, _ in self._running.values())]
        seed = self.sampling.seed
        if seed is None or not known:
            return seed
        if parent is not None and all(node.parent != parent.number for node in known):
            return parent.seed
        return derive_seed(seed, "turn", number)

    def _continued(self, asked: Sequence[Message], tools: list[dict[str, Any]]) -> Node | None:
        """The deepest turn that the conversation goes on from; the latest of several that read the same."""
        best: Node | None = None
        for number, known in reversed(self._known.items()):  # the last one first: usually no other is deeper
            node = self.tree[number]
            deeper = best is None or len(node.messages) > len(best.messages)
            if deeper and len(known) < len(asked) and node.tools == tools and begins_with(asked, known):
                best = node
        return best

    async def _sample(self, node: Node, max_new_tokens: int | None, stop_token_ids: Sequence[int] = ()) -> None:
        if node.finish_reason != "running":
            return  # recorded to its end
        ids = [*self.tree.ids_before(node), *node.token_ids]
        first = next(iter(self.tree.path(node.parent)), node)
        room = self.settings.response_length - (len(ids) - min(len(first.observed), self.settings.prompt_length))
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

    def _as_turn(self, node: Node) -> Turn:
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
        num_prompt_tokens = len(self.tree.ids_before(node))
        return Turn(message, text, calls, node.finish_reason, tuple(ids), node.number, num_prompt_tokens)


def _has_result(future: asyncio.Future[GenerationResult]) -> bool:
    """Of one that is done."""
    return not future.cancelled() and future.exception() is None
