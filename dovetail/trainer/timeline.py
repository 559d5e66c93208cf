"""Who worked on what in a step: phases of the driver, calls of workers, engines; rows for `RunFolder.log_timeline`."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.controller import WorkerGroup
from dovetail.observability.timers import PhaseTimers

TimelineRow = tuple[str, str, float, float, float | None]

# A thousand ranks say no more than these, and would make the folder grow by gigabytes.
MOST_WORKERS = 64


def take_timeline(
    timers: PhaseTimers, processes: WorkerGroup, engines: Sequence[Sequence[tuple[str, float, float]]] = ()
) -> list[TimelineRow]:
    """Everything since the last call of this. With many ranks: evenly spaced ones, the first among them.

    `engines`: what those on devices of their own did.
    """
    rows: list[TimelineRow] = [
        ("driver", phase, start, end, None) for phase, start, end in timers.take_spans() if phase != "step"
    ]
    calls = processes.take_spans()
    for rank in _shown(len(calls)):
        rows += [(f"worker {rank}", span.method, span.start, span.end, span.memory_gib) for span in calls[rank]]
    end = max((row[3] for row in rows), default=0.0)
    for rank in _shown(len(engines)):
        # One that did nothing is there, too: else it would not count as idle.
        done = engines[rank] or [("generate_groups", end, end)]
        rows += [(f"engine {rank}", what, start, end, None) for what, start, end in done]
    return rows


def _shown(count: int) -> range:
    return range(0, count, -(-count // MOST_WORKERS) or 1)
