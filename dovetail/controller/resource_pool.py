"""Where processes may run: reserved slots on the nodes of a Ray cluster. Starts no process itself.

A slot is one bundle of a placement group: one CPU, and one GPU when the pool has GPUs. ``max_colocate_count`` groups
can stand on the same slots, each process taking that fraction of them. Slots are ordered by node, so the ranks of a
node are contiguous, and the order does not change when the same cluster runs the job again.
"""

from __future__ import annotations

import ipaddress
import math
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_PLACING_S = 5
"""A group that Ray has room for is placed within this."""
_GIVING_BACK: set[Future[None]] = set()


@dataclass(frozen=True)
class Slot:
    """Room for one rank: a bundle on a node."""

    placement_group: PlacementGroup
    bundle_index: int
    node: str
    node_id: str


class RayResourcePool:
    """``process_on_nodes=[8, 8]`` is room for 16 ranks, 8 on each of two nodes.

    With ``bin_pack`` the processes of one entry are on one node (STRICT_PACK), else Ray may spread them when one node
    has no room (PACK). Two entries may end up on the same node when it has room for both.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 1,
        *,
        bin_pack: bool = True,
        cpus_per_slot: float = 1.0,
        accelerator: str = "GPU",
        placement_timeout_s: float = 300.0,
    ) -> None:
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise ValueError(f"process_on_nodes={list(process_on_nodes)} must list at least one process for each node.")
        if max_colocate_count < 1:
            raise ValueError(f"max_colocate_count={max_colocate_count} must be at least 1.")
        self.store = list(process_on_nodes)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or f"pool-{uuid.uuid4().hex[:6]}"
        self.max_colocate_count = max_colocate_count
        self.bin_pack = bin_pack
        self.cpus_per_slot = cpus_per_slot
        self.accelerator = accelerator
        self.placement_timeout_s = placement_timeout_s
        self._slots: list[Slot] | None = None

    @property
    def world_size(self) -> int:
        """Number of slots."""
        return sum(self.store)

    def slots(self) -> list[Slot]:
        """Reserve the slots, once; ordered by node."""
        if self._slots is None:
            self._slots = self._reserve()
        return self._slots

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The placement groups behind the slots, in the order of their ranks."""
        return list({slot.placement_group.id: slot.placement_group for slot in self.slots()}.values())

    def actor_options(self) -> dict[str, Any]:
        """The share of a slot that one process takes, as Ray actor options."""
        # Rounded down to Ray's granularity: seven times 1/7 rounded to nearest would not fit into one.
        share = math.floor(10_000 / self.max_colocate_count) / 10_000
        options: dict[str, Any] = {"num_cpus": self.cpus_per_slot * share}
        if self.use_gpu and self.accelerator == "GPU":
            options["num_gpus"] = share
        elif self.use_gpu:
            options["resources"] = {self.accelerator: share}
        return options

    def split(self, sizes: int | Sequence[int]) -> list[RayResourcePool]:
        """Pools over disjoint runs of this pool's slots. An int gives pools of that size."""
        if isinstance(sizes, int):
            sizes = [sizes] * (self.world_size // max(sizes, 1))
        if sum(sizes) != self.world_size or any(size < 1 for size in sizes):
            raise ValueError(f"{self.name_prefix}: sizes={list(sizes)} must add up to its {self.world_size} slots.")
        pools, start = [], 0
        for number, size in enumerate(sizes):
            pools.append(self._over(self.slots()[start : start + size], f"{self.name_prefix}-{number}"))
            start += size
        return pools

    def release(self) -> None:
        """Give the slots back to the cluster. Processes on them end."""
        if self._slots is not None:
            _give_back(self.get_placement_groups())
        self._slots = None

    def _over(self, slots: Sequence[Slot], name: str) -> RayResourcePool:
        pool = RayResourcePool(
            [len(slots)],
            self.use_gpu,
            name,
            self.max_colocate_count,
            bin_pack=self.bin_pack,
            cpus_per_slot=self.cpus_per_slot,
            accelerator=self.accelerator,
        )
        pool._slots = list(slots)
        return pool

    def _reserve(self) -> list[Slot]:
        import ray
        from ray.util.placement_group import placement_group

        bundle: dict[str, float] = {"CPU": self.cpus_per_slot}
        if self.use_gpu:
            bundle[self.accelerator] = 1
        self._check_cluster(bundle)
        groups: list[PlacementGroup] = []
        try:
            for number, count in enumerate(self.store):
                strategy = "STRICT_PACK" if self.bin_pack else "PACK"
                groups.append(placement_group([bundle] * count, strategy, name=f"{self.name_prefix}:{number}"))
            _, waiting = ray.wait(
                [group.ready() for group in groups], num_returns=len(groups), timeout=self.placement_timeout_s
            )
            if waiting:
                raise TimeoutError(
                    f"{self.name_prefix}: {len(waiting)} of {len(groups)} nodes' processes {self.store} found no room "
                    f"of {bundle} each within {self.placement_timeout_s:.0f} s; free now: {ray.available_resources()}. "
                    "End other jobs, lower process_on_nodes, or raise max_colocate_count and share a pool."
                )
            return _sorted_slots(groups)
        except BaseException:  # also Ctrl-C: the next run in this process would wait for the slots
            _give_back(groups, placing_s=_PLACING_S)
            raise

    def _check_cluster(self, bundle: dict[str, float]) -> None:
        """Fail at once when even the empty cluster is too small; Ray would wait for ever."""
        import ray

        total = ray.cluster_resources()
        for resource, amount in bundle.items():
            if total.get(resource, 0) < amount * self.world_size:
                raise ValueError(
                    f"{self.name_prefix}: process_on_nodes={self.store} needs {amount * self.world_size:g} {resource}, "
                    f"but the cluster has {total.get(resource, 0):g}; use fewer processes, add nodes, or (for CPU) "
                    "start Ray with a larger num_cpus."
                )


def _give_back(groups: Sequence[PlacementGroup], *, placing_s: float = 0.0) -> None:
    """On a thread, where no further Ctrl-C can interrupt it: what is left of it goes on beside whatever the caller does
    then, and a process ends after it. `placing_s` is how long the groups may still be in the course of being placed."""
    import ray

    given_back: Future[None] = Future()

    def give_back() -> None:
        give_up = time.monotonic() + placing_s
        try:
            for group in groups:
                if placing_s:  # Ray never frees the slots of a group that is removed while it is being placed
                    group.wait(max(0.0, give_up - time.monotonic()))
                ray.util.remove_placement_group(group)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            given_back.set_exception(error)
        else:
            given_back.set_result(None)

    _GIVING_BACK.add(given_back)  # before it begins: whoever leaves Ray from now on waits for it
    given_back.add_done_callback(_GIVING_BACK.discard)
    threading.Thread(target=give_back, name="slots given back").start()
    given_back.result()


def wait_for_slots_given_back() -> None:
    """Also those whose giver was interrupted. A call to Ray that has ended would never return, or start another one."""
    wait(set(_GIVING_BACK), timeout=2 * _PLACING_S)


def _sorted_slots(groups: Sequence[PlacementGroup]) -> list[Slot]:
    import ray

    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    slots = []
    for group in groups:
        node_ids = ray.util.placement_group_table(group)["bundles_to_node_id"]
        slots += [Slot(group, index, addresses[node_ids[index]], node_ids[index]) for index in sorted(node_ids)]
    return sorted(slots, key=_node_order)  # stable: bundles of one node keep their order


def _node_order(slot: Slot) -> tuple[int, str]:
    return int(ipaddress.ip_address(slot.node)), slot.node_id
