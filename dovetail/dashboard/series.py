"""A long row of numbers made short enough to draw, and smooth. Pure functions on arrays."""

from __future__ import annotations

import itertools

import numpy as np


def smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """Exponential average without the pull of a start at zero; 0 leaves the values as they are, 0.99 is very smooth."""
    if weight <= 0:
        return values
    averages = np.empty(len(values))
    total, norm = 0.0, 0.0
    for index, value in enumerate(values.tolist()):
        total = total * weight + value * (1 - weight)
        norm = norm * weight + (1 - weight)
        averages[index] = total / norm
    return averages


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Indices of at most `most` points: of every stretch its lowest and its highest, so that no spike is lost."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, max(1, (most - 2) // 2) + 1).astype(int)
    chosen = {0, count - 1}
    for start, stop in itertools.pairwise(edges.tolist()):
        part = values[start:stop]
        chosen.add(start + int(part.argmin()))
        chosen.add(start + int(part.argmax()))
    return np.array(sorted(chosen))


def spaced(count: int, most: int) -> np.ndarray:
    """At most `most` indices of `count`, evenly spaced, the first and the last among them."""
    return np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, most).astype(int))


def binned_means(steps: np.ndarray, columns: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Means over at most `most` runs of neighbouring steps: the first step of each, and `[columns, runs]`."""
    count = len(steps)
    if count <= most:
        return steps, columns
    edges = np.linspace(0, count, most + 1).astype(int)
    means = np.add.reduceat(columns, edges[:-1], axis=1) / np.diff(edges)
    return steps[edges[:-1]], means


def rounded(values: np.ndarray) -> list[float]:
    """Finite numbers for JSON: six digits are enough for an eye."""
    return [float(f"{value:.6g}") for value in values.tolist()]
