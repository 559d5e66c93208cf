"""How fast, and whether correctly, all ranks of a group exchange tensors: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.controller import Dispatch, Worker, register

_REPEATS = 3
_TIMEOUT = timedelta(seconds=120)
_LINK_BYTES = 16 * 1024**2
_MAX_LINK_RANKS = 16
"""Pairs grow with the square of the ranks; beyond this many only the collectives are measured."""


@dataclass(frozen=True)
class Bandwidths:
    """Gigabytes a second. `links` are pairs of ranks, one after the other."""

    all_reduce: float
    """Bus bandwidth: bytes x 2 (n - 1) / n, as nccl-tests counts it."""
    broadcast: float
    links: dict[tuple[int, int], float]
    host: str

    @property
    def slowest(self) -> tuple[tuple[int, int], float] | None:
        return min(self.links.items(), key=lambda item: item[1]) if self.links else None


class CollectivesWorker(Worker):
    """One rank of the measurement."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def measure(self, num_bytes: int) -> Bandwidths:
        """Raises where a collective gives a wrong number."""
        self.init_process_group(timeout=_TIMEOUT)
        values = torch.empty(num_bytes // 4, dtype=torch.float32, device=self.device)
        size = self.world_size

        def all_reduce() -> None:
            values.fill_(self.rank + 1)
            dist.all_reduce(values)

        def broadcast() -> None:
            values.fill_(self.rank + 1)
            dist.broadcast(values, src=size - 1)

        reduced = self._seconds(all_reduce)
        self._require(values, size * (size + 1) / 2, "all-reduce")
        sent = self._seconds(broadcast)
        self._require(values, size, f"broadcast from rank {size - 1}")
        bus = num_bytes * 2 * (size - 1) / size / reduced / 1e9
        return Bandwidths(bus, num_bytes / sent / 1e9, self._links(), self.context.node or "this machine")

    def _links(self) -> dict[tuple[int, int], float]:
        if self.world_size > _MAX_LINK_RANKS:
            return {}
        payload = torch.empty(_LINK_BYTES // 4, dtype=torch.float32, device=self.device)
        links = {}
        for first, second in combinations(range(self.world_size), 2):

            def exchange(first: int = first, second: int = second) -> None:
                if self.rank == first:
                    payload.fill_(first + 1)
                    dist.send(payload, second)
                elif self.rank == second:
                    dist.recv(payload, first)

            links[first, second] = _LINK_BYTES / self._seconds(exchange) / 1e9
            if self.rank == second:
                self._require(payload, first + 1, f"send from rank {first} to rank {second}")
        return links

    def _seconds(self, exchange: Callable[[], None]) -> float:
        """The fastest of several, after one that sets up connections; the slowest rank counts."""
        exchange()
        fastest = float("inf")
        for _ in range(_REPEATS):
            dist.barrier()
            self._wait_for_device()
            start = time.perf_counter()
            exchange()
            self._wait_for_device()
            took = torch.tensor([time.perf_counter() - start], device=self.device)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            fastest = min(fastest, float(took))
        return fastest

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _require(self, values: Tensor, expected: float, what: str) -> None:
        low, high = float(values.min()), float(values.max())
        if not low == high == expected:
            raise RuntimeError(
                f"{what}: rank {self.rank} on {self.context.node} has values from {low:g} to {high:g} where "
                f"{expected:g} is right. The link damages tensors; look at it with NCCL_DEBUG=INFO."
            )
