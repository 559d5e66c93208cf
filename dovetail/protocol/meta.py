"""Merge the ``meta_info`` of several batches. Knows nothing of rows or columns.

Three kinds of keys: ``metrics`` are collected into lists, one entry per report; ``timing`` dicts keep the slowest rank,
because a phase lasts until its last rank is done; every other key must agree, or the merge is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.protocol.compare import deep_equal

METRICS = "metrics"
TIMINGS = ("timing", "timing_raw")


def merge_meta_info(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the meta_info of batches that are concatenated: the same step, seen by different ranks."""
    merged: dict[str, Any] = {}
    reports: list[Mapping[str, Any]] = []
    for number, part in enumerate(parts):
        for key, value in part.items():
            if key == METRICS:
                reports.extend(_as_reports(value))
            elif key in TIMINGS and isinstance(value, Mapping):
                merged[key] = _slowest(merged.get(key, {}), value)
            elif key not in merged:
                merged[key] = value
            elif not deep_equal(merged[key], value):
                raise ValueError(
                    f"meta_info[{key!r}] is {merged[key]!r} in an earlier batch and {value!r} in batch {number}; "
                    f"concat keeps one value, so set it equally on all of them or pop it first."
                )
    if reports:
        merged[METRICS] = _collect(reports)
    elif any(METRICS in part for part in parts):
        merged[METRICS] = {}
    return merged


def unite_meta_info(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Unite the meta_info of two stages of one step. ``metrics`` and ``timing`` dicts unite key by key."""
    united = dict(left)
    for key, value in right.items():
        nested = key == METRICS or key in TIMINGS
        if key not in united:
            united[key] = value
        elif nested and isinstance(united[key], Mapping) and isinstance(value, Mapping):
            united[key] = _unite(united[key], value, f"meta_info[{key!r}]")
        else:
            _refuse_clash(united[key], value, f"meta_info[{key!r}]")
    return united


def _unite(left: Mapping[str, Any], right: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key in left.keys() & right.keys():
        _refuse_clash(left[key], right[key], f"{where}[{key!r}]")
    return {**left, **right}


def _refuse_clash(left: Any, right: Any, where: str) -> None:
    if not deep_equal(left, right):
        raise ValueError(
            f"{where} is {left!r} here and {right!r} in the other batch; union keeps one value, so pop or rename one."
        )


def _as_reports(value: Any) -> list[Mapping[str, Any]]:
    if value is None:
        return []
    reports = list(value) if isinstance(value, (list, tuple)) else [value]
    for report in reports:
        if not isinstance(report, Mapping):
            raise TypeError(
                f"meta_info['metrics'] holds a {type(report).__name__}; it must be a dict of name to value, "
                f"or a list of such dicts."
            )
    return reports


def _collect(reports: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    # Lists extend instead of nesting, so merging merged batches gives the same as merging all at once.
    collected: dict[str, list[Any]] = {}
    for report in reports:
        for name, value in report.items():
            collected.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return collected


def _slowest(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    slowest = dict(left)
    for name, seconds in right.items():
        slowest[name] = max(slowest[name], seconds) if name in slowest else seconds
    return slowest
