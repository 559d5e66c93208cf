"""Scoring processes on the other nodes of a cluster: one Ray actor a node, with a pool of processes in it.

The actor only passes calls on. A node that is lost hands its calls back; nothing is scored 0 for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from dovetail.rewards.errors import RewardError
from dovetail.rewards.pool import START_SECONDS, KillablePool

logger = logging.getLogger(__name__)


class NodeScorers:
    """Runs in the actor: a `KillablePool` of that node."""

    def __init__(self, search_path: Sequence[str], options: dict[str, Any]) -> None:
        sys.path[:] = list(dict.fromkeys([*search_path, *sys.path]))
        self._pool = KillablePool(**options)
        self._running: dict[int, Future[Any]] = {}

    async def score(self, number: int, message: bytes) -> Any:
        self._running[number] = future = self._pool.submit_message(message)
        try:
            return await asyncio.wrap_future(future)
        finally:
            del self._running[number]

    async def cancel(self, numbers: Sequence[int]) -> None:
        self._pool.cancel([self._running[number] for number in numbers if number in self._running])

    async def pids(self) -> list[int]:
        return self._pool.pids()

    async def close(self) -> None:
        self._pool.close()


class NodePool:
    """The driver's side of one node."""

    def __init__(self, node: str, actor: Any, num_workers: int) -> None:
        self.node = node
        self.num_workers = num_workers
        self.actor = actor
        self._numbers: dict[Future[Any], int] = {}
        self._next = 0

    def submit_message(self, message: bytes) -> Future[Any]:
        """Send one call. The future raises when the node is lost."""
        self._next += 1
        future: Future[Any] = self.actor.score.remote(self._next, message).future()
        self._numbers[future] = self._next
        future.add_done_callback(self._numbers.pop)
        return future

    def cancel(self, futures: Sequence[Future[Any]]) -> None:
        numbers = [number for future in futures if (number := self._numbers.get(future)) is not None]
        if numbers:
            self.actor.cancel.remote(numbers)

    def close(self) -> None:
        """End the actor. Its scoring processes end with it, as they do with any driver."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.actor)


def start_node_pools(options: dict[str, Any], *, most: int) -> list[NodePool]:
    """A pool on each living node but this one, `most` at most. Raises when a reward function cannot be used there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    scorers: Any = ray.remote(NodeScorers)
    pools = []
    for node in sorted(addresses.keys() - {here})[:most]:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = scorers.options(scheduling_strategy=there, num_cpus=0, max_concurrency=1000).remote(
            list(sys.path), options
        )
        pools.append(NodePool(addresses[node], actor, options["num_workers"]))
    for pool in pools:
        try:
            ray.get(pool.actor.pids.remote(), timeout=2 * START_SECONDS)
        except ray.exceptions.RayError as error:
            for started in pools:
                started.close()
            raise RewardError(
                f"node {pool.node} cannot score answers: {error}\nFiles and packages of the reward function must be "
                "there too; or set reward_model.score_on=driver_node."
            ) from None
    if pools:
        logger.info("%d other nodes score answers, with %d processes each", len(pools), options["num_workers"])
    return pools
