"""What the files of a step's answers keep of an agent's trajectory. `docs/agents-design.md` describes the record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.protocol import DataProto
from dovetail.protocol.trajectories import trajectories_of

MOST_CHARACTERS = 4000
"""Of one text in a record; the middle of a longer one is left out."""


def agent_records(batch: DataProto) -> list[dict[str, Any]]:
    """By row: `messages`, `events` and `turn_rewards` on the last row of each trajectory, nothing on others."""
    columns = batch.non_tensor_batch
    names = [name for name in ("messages", "events", "turn_rewards") if name in columns]
    trajectories = trajectories_of(batch)
    shown = set(range(len(batch)) if trajectories is None else trajectories.last)
    return [
        {name: _short(columns[name][row]) for name in names if columns[name][row] is not None} if row in shown else {}
        for row in range(len(batch))
    ]


def _short(value: Any) -> Any:
    """Plain JSON, long texts without their middle."""
    if isinstance(value, str):
        half = MOST_CHARACTERS // 2
        return value if len(value) <= MOST_CHARACTERS else f"{value[:half]} [...] {value[-half:]}"
    if isinstance(value, Mapping):
        return {str(name): _short(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_short(entry) for entry in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
