"""Who worked on what in a step: the driver's phases and the workers' calls, as rows for `RunFolder.log_timeline`."""

from __future__ import annotations

from dovetail.controller import WorkerGroup
from dovetail.observability.timers import PhaseTimers

TimelineRow = tuple[str, str, float, float, float | None]

# A thousand ranks say no more than these, and would make the folder grow by gigabytes.
MOST_WORKERS = 64


def take_timeline(timers: PhaseTimers, processes: WorkerGroup) -> list[TimelineRow]:
    """Everything since the last call of this. With many ranks: evenly spaced ones, the first among them."""
    rows: list[TimelineRow] = [
        ("driver", phase, start, end, None) for phase, start, end in timers.take_spans() if phase != "step"
    ]
    calls = processes.take_spans()
    stride = -(-len(calls) // MOST_WORKERS)
    for rank in range(0, len(calls), stride):
        rows += [(f"worker {rank}", span.method, span.start, span.end, span.memory_gib) for span in calls[rank]]
    return rows
