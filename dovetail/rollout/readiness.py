"""When an engine may be used: what is asleep, and whether its weights are complete. Decides nothing about memory."""

from __future__ import annotations

from collections.abc import Collection

from dovetail.rollout.base import ALL_TAGS, EngineError, MemoryTag

CLOSED = "the engine is closed; build a new one."
RUNNING = "requests are running; finish, abort or pause them before sleep."
NO_WEIGHTS = -1
"""`weight_version` of an engine that dropped its weights in its sleep."""
DROPPED_BY_SLEEP = "the weights were dropped by sleep and not sent again"


def check_tags(tags: Collection[MemoryTag]) -> frozenset[MemoryTag]:
    """The tags; ValueError for one that does not exist."""
    unknown = sorted(set(tags) - set(ALL_TAGS))
    if unknown:
        raise ValueError(f"unknown memory tag {unknown[0]!r}; choose from {', '.join(ALL_TAGS)}.")
    return frozenset(tags)


def require_usable(asleep: Collection[MemoryTag], partial_update: str) -> None:
    """EngineError unless everything is awake and the weights are complete; `partial_update` says why they are not."""
    if asleep:
        raise EngineError(f"the engine's {' and '.join(sorted(asleep))} are asleep; call wake() first.")
    if partial_update:
        raise EngineError(f"the engine has no usable weights: {partial_update}; send all with update_weights.")


def require_weights_awake(asleep: Collection[MemoryTag], before: str = "update_weights") -> None:
    """EngineError while the weights sleep: an update would have nowhere to go."""
    if "weights" in asleep:
        raise EngineError(f"the engine's weights are asleep; call wake(['weights']) before {before}.")
