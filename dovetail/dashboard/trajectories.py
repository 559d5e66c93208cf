"""Records of agents' trajectories in response files: how they ended, what their tools did, where their time went.

`docs/agents-design.md` describes the record. A line without `outcome` is a plain response and has none of this.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dovetail.dashboard.charts import binned_means, rounded
from dovetail.dashboard.run_files import MetricsTable

_LOOP = "timing_s/agent_loop/"
# Of an average trajectory; what is left of the generation phase is idle: others still run.
_PARTS = (("generate_sequences", "waiting for the engine"), ("tool_calls", "waiting for tools"))
_TEXTS = ("kind", "name", "failure", "why")


def summary(row: dict[str, Any]) -> dict[str, Any] | None:
    """How a trajectory ended and what its tools did, in a few numbers; None for a plain response."""
    if not isinstance(row.get("outcome"), str):
        return None
    events = events_of(row)
    # A reply of an environment is recorded as a call without arguments; the model called nothing.
    replies = [event for event in events if event.get("name") == "respond" and "arguments" not in event]
    calls = [event for event in events if event["kind"] == "tool" and event not in replies]
    return {
        "outcome": row["outcome"],
        "trajectory": _whole(row.get("trajectory")),
        "segment": _whole(row.get("segment")),
        "num_turns": _whole(row.get("num_turns")),
        "calls": len(calls),
        "failures": sum("failure" in call for call in [*calls, *replies]),
        "tools": sorted({call["name"] for call in calls if "name" in call}),
        "seconds": {kind: _seconds(events, kind) for kind in ("generate", "tool")},
    }


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """The messages, events and turn rewards of a record, each only if it has the form it should have."""
    return {
        "messages": [message for message in _list_of(row, "messages") if isinstance(message, dict)],
        "events": events_of(row),
        "turn_rewards": [pair for pair in _list_of(row, "turn_rewards") if isinstance(pair, list) and len(pair) == 2],
    }


def events_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What happened in a trajectory, in order."""
    events = _list_of(row, "events")
    known = [event for event in events if isinstance(event, dict) and isinstance(event.get("kind"), str)]
    # A failure or a name that is null is one that is not there.
    return [{name: value for name, value in event.items() if name not in _TEXTS or value} for event in known]


def time_of_trajectories(table: MetricsTable, most: int) -> dict[str, Any]:
    """Seconds of an average trajectory in each step: for the engine, for tools, idle. Empty without agents."""
    columns = np.array([table.column(f"{_LOOP}{name}/mean") for name, _ in _PARTS])
    generation = table.column("timing_s/gen")
    kept = np.isfinite(columns).all(axis=0) & np.isfinite(generation)
    if not kept.any():
        return {"steps": [], "parts": []}
    idle = np.maximum(generation[kept] - columns[:, kept].sum(axis=0), 0.0)
    steps, means = binned_means(table.steps[kept], np.vstack([columns[:, kept], idle]), most)
    names = [*(name for _, name in _PARTS), "idle: other trajectories still run"]
    return {
        "steps": steps.tolist(),
        "parts": [{"name": name, "seconds": rounded(row)} for name, row in zip(names, means, strict=True)],
    }


def _seconds(events: list[dict[str, Any]], kind: str) -> float:
    values = [event.get("seconds") for event in events if event["kind"] == kind]
    return float(sum(value for value in values if isinstance(value, (int, float))))


def _list_of(row: dict[str, Any], name: str) -> list[Any]:
    value = row.get(name)
    return value if isinstance(value, list) else []


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) else 0
