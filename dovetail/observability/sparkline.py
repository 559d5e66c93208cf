"""A row of block characters for a row of numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` blocks. Longer series are averaged into buckets, so that the whole history is seen."""
    series = [value for value in values if math.isfinite(value)]
    if not series or width < 1:
        return ""
    points = _buckets(series, width) if len(series) > width else series
    low, high = min(points), max(points)
    if high == low:
        return _BLOCKS[len(_BLOCKS) // 2] * len(points)
    scale = (len(_BLOCKS) - 1) / (high - low)
    return "".join(_BLOCKS[round((point - low) * scale)] for point in points)


def _buckets(series: Sequence[float], count: int) -> list[float]:
    edges = [len(series) * i // count for i in range(count + 1)]
    return [sum(series[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
