"""What is reported about agents' trajectories: turns, tool calls, seconds, outcomes.

Names are verl's where it has them. Each trajectory counts once, however many rows it became.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.protocol import DataProto
from dovetail.protocol.trajectories import one_row_each
from dovetail.trainer.step_metrics import spread

Metrics = dict[str, float]
Event = Mapping[str, Any]


def agent_metrics(batch: DataProto) -> Metrics:
    """Nothing for a batch without agents.

    `num_turns/*`, `tool_call_counts/*`, `timing_s/agent_loop/{generate_sequences,tool_calls}/*` and `slowest/*`, and
    `outcome/<name>`: the share of trajectories that ended so. `trajectory/restarted` counts those that a resume began
    again. `tool/<name>` is what tools reported: the sum of a trajectory's calls, the mean of those that have one.
    `loop/<name>` is what an agent loop for verl says of its trajectories.
    """
    if "outcome" not in batch.non_tensor_batch:
        return {}
    columns = one_row_each(batch).non_tensor_batch
    outcomes = Counter(map(str, columns["outcome"]))
    metrics = {f"outcome/{name}": count / outcomes.total() for name, count in sorted(outcomes.items())}
    if "num_turns" in columns:
        metrics |= spread("num_turns", np.asarray(columns["num_turns"], dtype=np.float64))
    if "events" not in columns:
        return metrics
    events: list[Sequence[Event]] = [list(row or ()) for row in columns["events"]]
    calls = [[event for event in row if event["kind"] == "tool"] for row in events]
    metrics |= spread("tool_call_counts", np.array([len(row) for row in calls]))
    metrics["tool_call_counts/failed_share"] = _share([event for row in calls for event in row])
    metrics["tool_call_counts/retries"] = float(sum(event["kind"] == "retry" for row in events for event in row))
    metrics["trajectory/restarted"] = float(sum(event["kind"] == "restart" for row in events for event in row))
    metrics |= {f"{kind}/{name}": value for kind in ("tool", "loop") for name, value in _reported(events, kind).items()}
    generating, waiting = (np.array([_seconds(row, kind) for row in events]) for kind in ("generate", "tool"))
    timing = spread("generate_sequences", generating) | spread("tool_calls", waiting)
    slowest = int(np.argmax(generating + waiting))
    timing |= {
        "slowest/generate_sequences": float(generating[slowest]),
        "slowest/tool_calls": float(waiting[slowest]),
    }
    return metrics | {f"timing_s/agent_loop/{name}": value for name, value in timing.items()}


def _seconds(events: Sequence[Event], kind: str) -> float:
    return float(sum(event.get("seconds") or 0.0 for event in events if event["kind"] == kind))


def _reported(events: Sequence[Sequence[Event]], kind: str) -> Metrics:
    """Sums over the events of a trajectory, as means over the trajectories that have the name."""
    sums: dict[str, list[float]] = {}
    for row in events:
        given = [event.get("metrics") or {} for event in row if event["kind"] == kind]
        for name in {name for metrics in given for name in metrics}:
            sums.setdefault(name, []).append(sum(metrics.get(name, 0.0) for metrics in given))
    return {name: float(np.mean(values)) for name, values in sorted(sums.items())}


def _share(calls: Sequence[Event]) -> float:
    """Of calls whose result was a failure."""
    return sum(bool(call.get("failure")) for call in calls) / max(len(calls), 1)
