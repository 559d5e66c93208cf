"""Share sequences out so that every part has about the same work (Karmarkar-Karp differencing).

Works on plain lists of numbers. Knows nothing of batches, devices or process groups.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def get_seqlen_balanced_partitions(
    lengths: Sequence[int | float], num_partitions: int, equal_size: bool = False
) -> list[list[int]]:
    """Indices of `lengths` in `num_partitions` non-empty parts of nearly equal sum, each part in ascending order.

    `equal_size` gives every part the same number of items, as data-parallel ranks need; without it only sums count.
    """
    count = len(lengths)
    if num_partitions < 1 or count < num_partitions:
        raise ValueError(
            f"cannot split {count} sequences into {num_partitions} non-empty parts; ask for at most {count}."
        )
    if equal_size and count % num_partitions:
        raise ValueError(
            f"{count} sequences do not make {num_partitions} equal parts; pad to a multiple of {num_partitions}."
        )
    # A weight of zero would make a used slot look empty, and an empty part could remain.
    weights = np.maximum(np.asarray(lengths, dtype=np.float64), 1e-9)
    partitions = _karmarkar_karp(weights, num_partitions, equal_size)
    return sorted((sorted(part) for part in partitions), key=lambda part: part[0])


def inverse_order(order: Sequence[int]) -> list[int]:
    """`inverse` such that `reordered[inverse]` is the original, where `reordered = original[order]`."""
    inverse = [0] * len(order)
    for position, index in enumerate(order):
        inverse[index] = position
    return inverse


def _karmarkar_karp(weights: np.ndarray, num_partitions: int, equal_size: bool) -> list[list[int]]:
    """Largest differencing method for k sets.

    A state is k slots with their sums, ascending; the two states of largest spread are merged, large slots onto small
    ones, until one remains. What a slot holds is a node of a binary forest, unrolled at the end: a merge then costs
    O(k log k) in numpy whatever the number of items, and 16,000 sequences take a fraction of a second.
    """
    children: list[tuple[int, int]] = []  # node `len(weights) + i` joins the two nodes children[i]
    heap: list[tuple[float, int, np.ndarray, np.ndarray]] = []
    for serial, (sums, nodes) in enumerate(_initial_states(weights, num_partitions, equal_size)):
        heap.append((sums[0] - sums[-1], serial, sums, nodes))
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        _, _, sums_a, nodes_a = heapq.heappop(heap)
        _, _, sums_b, nodes_b = heapq.heappop(heap)
        sums = sums_a + sums_b[::-1]
        other = nodes_b[::-1]
        nodes = np.maximum(nodes_a, other)  # -1 is an empty slot
        for slot in np.flatnonzero((nodes_a >= 0) & (other >= 0)):
            nodes[slot] = len(weights) + len(children)
            children.append((int(nodes_a[slot]), int(other[slot])))
        order = np.argsort(sums, kind="stable")
        sums, nodes = sums[order], nodes[order]
        heapq.heappush(heap, (sums[0] - sums[-1], serial, sums, nodes))
        serial += 1
    return [_unroll(int(node), len(weights), children) for node in heap[0][3]]


def _initial_states(weights: np.ndarray, num_partitions: int, equal_size: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    if equal_size:  # one item in every slot: merging keeps the counts equal
        rows = np.argsort(weights, kind="stable").reshape(-1, num_partitions)
        return [(weights[row], row.astype(np.int64)) for row in rows]
    states = []
    for index, weight in enumerate(weights):
        sums, nodes = np.zeros(num_partitions), np.full(num_partitions, -1, dtype=np.int64)
        sums[-1], nodes[-1] = weight, index
        states.append((sums, nodes))
    return states


def _unroll(root: int, num_items: int, children: list[tuple[int, int]]) -> list[int]:
    items, stack = [], [root]
    while stack:
        node = stack.pop()
        if node < num_items:
            items.append(node)
        else:
            stack.extend(children[node - num_items])
    return items
