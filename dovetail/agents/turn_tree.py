"""`TurnTree`: the turns of one trajectory, each with the ids it was sampled after. Rows are paths through it.

A turn is a child of the one that it goes on from; without a parent it begins a segment. Knows no engine and no chat
template.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from dovetail.agents.types import Message, Segment
from dovetail.rollout.assemble import Response
from dovetail.rollout.base import FinishReason, GenerationResult


@dataclass(slots=True)
class Node:
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

    @property
    def result(self) -> GenerationResult:
        """What the engine gave for this turn."""
        reason = cast("FinishReason", self.finish_reason)
        return GenerationResult("", 0, self.token_ids, self.log_probs, reason, self.weight_versions)


class TurnTree(dict[int, Node]):
    """The turns by number. A parent has a lower number than its children."""

    @property
    def in_order(self) -> list[Node]:
        return [self[number] for number in sorted(self)]

    def path(self, number: int | None) -> list[Node]:
        """From the beginning of a segment to this turn; empty for None."""
        path: list[Node] = []
        while number is not None:
            path.append(self[number])
            number = path[-1].parent
        return path[::-1]

    def ids_before(self, node: Node) -> list[int]:
        """What the model reads before it writes this turn, which need not be in the tree yet."""
        ids: list[int] = []
        for each in self.path(node.parent):
            ids += each.observed
            ids += each.token_ids
        return ids + node.observed

    def matches(self, ids: list[int]) -> dict[int, tuple[int, int]]:
        """The turns that stand in these ids behind exactly what they were sampled after.

        By the number of the turn: where its tokens begin, and how many of them are the same.
        """
        ends: dict[int | None, int] = {None: 0}
        matches: dict[int, tuple[int, int]] = {}
        for node in self.in_order:  # parents first
            begin = ends.get(node.parent)
            if begin is None or ids[begin : (at := begin + len(node.observed))] != node.observed:
                continue
            rest = ids[at : at + len(node.token_ids)]
            pairs = enumerate(zip(node.token_ids, rest, strict=False))
            same = next((count for count, (mine, theirs) in pairs if mine != theirs), len(rest))
            matches[node.number] = at, same
            if same == len(node.token_ids):
                ends[node.number] = at + same
        return matches

    def segments(self, prompt_length: int) -> tuple[Segment, ...]:
        """A row for each turn that no other continues: the path to it. What two paths share is sampled in the first.

        Of a segment's prompt `prompt_length` tokens are the row's; the rest is observed at the start of the response.
        """
        parents = {node.parent for node in self.values()}
        sampled: set[int] = set()
        return tuple(self._segment(leaf, sampled, prompt_length) for leaf in sorted(self) if leaf not in parents)

    def _segment(self, leaf: int, sampled: set[int], prompt_length: int) -> Segment:
        path = self.path(leaf)
        first = path[0]
        prompt, response, rewards = tuple(first.observed[:prompt_length]), Response(), []
        for node in path:
            response = response.with_tokens(node.observed[prompt_length:] if node is first else node.observed)
            if node.number in sampled:
                response = response.with_tokens(node.token_ids)
                continue
            sampled.add(node.number)
            response = response.with_result(node.result)
            if node.reward is not None:
                rewards.append((max(0, len(response.token_ids) - 1), node.reward))
        return Segment(prompt, response, tuple(rewards))
