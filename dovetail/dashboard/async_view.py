"""What an asynchronous run shows beside the rest: how stale its tokens are, and who waits for whom. Numbers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from dovetail.dashboard.charts import ASYNC, binned_means, rounded
from dovetail.dashboard.run_files import MetricsTable

LAG = "async/staleness/lag_"
_FEW_STEPS = 120

Span = dict[str, Any]

WAIT_WORDS = {
    "groups": "trainer: no finished group",
    "rewards": "trainer: no rewards",
    "testing": "trainer: validation",
    "driver": "trainer: between calls",
    "draws": "engine: no group to generate",
    "commit_weights": "engine: new weights",
}


def is_asynchronous(table: MetricsTable) -> bool:
    """Whether the run says how stale its tokens are."""
    return any(name in table.names for name in ASYNC[0].first_of)


def staleness(table: MetricsTable, most: int = _FEW_STEPS) -> dict[str, Any]:
    """Share of the trained tokens at each lag: per step (long runs averaged over neighbours), and over the run."""
    names = sorted((name for name in table.names if name.startswith(LAG)), key=_lag)
    columns = np.array([table.column(name) for name in names])
    kept = np.isfinite(columns).all(axis=0) if len(names) else np.zeros(0, dtype=bool)
    if not kept.any():
        return {"steps": [], "lags": [], "per_bar": 1}
    steps, shares = binned_means(table.steps[kept], columns[:, kept], most)
    used = 1 + max(index for index in range(len(names)) if index == 0 or shares[index].any())
    lags = [
        {
            "name": f"{_lag(name)}{'+' if index == len(names) - 1 else ''}",
            "shares": rounded(shares[index]),
            "mean": float(columns[index, kept].mean()),
        }
        for index, name in enumerate(names[:used])
    ]
    return {"steps": steps.tolist(), "lags": lags, "per_bar": max(1, round(int(kept.sum()) / len(steps)))}


def waits(spans: Iterable[Span]) -> list[Span]:
    """The gaps of every worker and engine, as spans whose `phase` is a key of `WAIT_WORDS`.

    A trainer's worker that runs no call while the driver is in `gen` waits for groups, in `reward` for rewards, in
    `testing` for the responses to validation prompts.
    """
    spans = list(spans)
    first, last = min((span["start"] for span in spans), default=0.0), max((span["end"] for span in spans), default=0.0)
    rows: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        rows.setdefault(span["worker"], []).append((span["start"], span["end"]))
    engines = any(row.startswith("engine ") for row in rows)
    phases = {
        "groups": [(span["start"], span["end"]) for span in spans if span["phase"] == "gen" and engines],
        "rewards": [(span["start"], span["end"]) for span in spans if span["phase"] == "reward"],
        "testing": [(span["start"], span["end"]) for span in spans if span["phase"] == "testing" and engines],
    }
    found: list[Span] = []
    for row, busy in rows.items():
        if row == "driver":
            continue
        gaps = _without([(first, last)], busy)
        if row.startswith("engine "):
            found += [_wait(row, "draws", gap) for gap in gaps]
            continue
        for reason, times in phases.items():
            found += [_wait(row, reason, part) for part in _common(gaps, times)]
            gaps = _without(gaps, times)
        found += [_wait(row, "driver", gap) for gap in gaps]
    return found


def idle_shares(spans: Iterable[Span]) -> dict[str, float]:
    """Share of a step by the reason of waiting: of the trainer's workers, and of the engines."""
    return {reason: share for (_, reason), share in _shares(list(spans)).items()}


def busy_shares(spans: Iterable[Span]) -> dict[str, float]:
    """Share of a step in which the trainer's workers (`worker`) and the engines (`engine`) worked."""
    spans = list(spans)
    idle = _shares(spans)
    kinds = {span["worker"].split()[0] for span in spans} - {"driver"}
    return {kind: 1 - sum(share for (whose, _), share in idle.items() if whose == kind) for kind in kinds}


def _shares(spans: list[Span]) -> dict[tuple[str, str], float]:
    """Share of the step that each kind of row is idle, by reason; rows of a kind are averaged. An engine generates
    nothing while it is given weights."""
    held = [span for span in spans if span["phase"] == "commit_weights"]
    duration = max((span["end"] for span in spans), default=0.0) - min((span["start"] for span in spans), default=0.0)
    num_rows = Counter(row.split()[0] for row in {span["worker"] for span in spans})
    shares: dict[tuple[str, str], float] = {}
    for part in (*waits(spans), *held):
        key = part["worker"].split()[0], part["phase"]
        shares[key] = shares.get(key, 0.0) + (part["end"] - part["start"]) / (num_rows[key[0]] * duration)
    return shares


def _lag(name: str) -> int:
    rest = name.removeprefix(LAG)
    return int(rest) if rest.isdecimal() else -1


def _wait(row: str, reason: str, gap: tuple[float, float]) -> Span:
    return {"worker": row, "phase": reason, "start": gap[0], "end": gap[1], "memory": None}


def _common(parts: list[tuple[float, float]], others: list[tuple[float, float]]) -> list[tuple[float, float]]:
    shared = [(max(a, c), min(b, d)) for a, b in parts for c, d in others]
    return [(start, end) for start, end in shared if end > start]


def _without(parts: list[tuple[float, float]], taken: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """`parts` less `taken`; shorter pieces than a millisecond are left out."""
    for start, end in taken:
        parts = [piece for a, b in parts for piece in ((a, min(b, start)), (max(a, end), b)) if piece[1] > piece[0]]
    return [(a, b) for a, b in parts if b - a > 0.001]
