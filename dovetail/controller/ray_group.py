"""`RayWorkerGroup`: a group whose ranks are Ray actors on the slots of a pool."""

from __future__ import annotations

import types
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.controller.context import WorkerContext
from dovetail.controller.forwarding import secrets
from dovetail.controller.futures import BatchFuture, BatchPart, GroupFuture
from dovetail.controller.hangs import CallLimits
from dovetail.controller.host import ProcessIdentity, WorkerHost
from dovetail.controller.processes import WorkerProcesses
from dovetail.controller.rendezvous import LOOPBACK
from dovetail.controller.resource_pool import RayResourcePool, Slot
from dovetail.controller.spans import Span
from dovetail.controller.watchdog import WATCHDOG
from dovetail.controller.worker import ClassWithInitArgs, RayClassWithInitArgs, Worker
from dovetail.controller.worker_group import Launch, WorkerGroup

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class RayWorkerGroup(WorkerGroup):
    """One actor per slot of ``resource_pool``, all built from ``ray_cls_with_init``.

    ``failure_grace_s`` is how long the other ranks of a failed call may take to finish before the group is stopped.
    ``limits`` say how long a call may take (`hangs`).
    """

    takes_slices = True

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs,
        *,
        name_prefix: str | None = None,
        failure_grace_s: float = 5.0,
        limits: CallLimits | None = None,
    ) -> None:
        roles = ray_cls_with_init.roles(name_prefix)
        title = "+".join(roles)
        slots = resource_pool.slots()
        unique = f"{title}-{uuid.uuid4().hex[:8]}"
        names = [f"{unique}:{rank}" for rank in range(len(slots))]
        options = {**resource_pool.actor_options(), **ray_cls_with_init.options}
        actors = [_start_actor(slot, name, options) for slot, name in zip(slots, names, strict=True)]
        processes = WorkerProcesses(tuple(roles), actors, names, failure_grace_s, limits)
        self._roles, self._pool = roles, resource_pool
        try:
            _build_workers(processes, roles, resource_pool)
        except BaseException:
            processes.stop()
            raise
        WATCHDOG.watch(processes)
        self._bind(processes, title, ray_cls_with_init.cls)

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        groups = {}
        for role in prefix_set:
            if role not in self._roles:
                raise ValueError(f"these processes host no role {role!r}; they host {sorted(self._roles)}.")
            groups[role] = view = RayWorkerGroup.__new__(RayWorkerGroup)
            view._roles, view._pool = self._roles, self._pool
            view._bind(self._processes, role, self._roles[role].cls)
        return groups

    @property
    def workers(self) -> list[ActorHandle]:
        """The actors by rank."""
        return self._processes.actors

    @property
    def identities(self) -> list[ProcessIdentity]:
        """Pid and node of every rank."""
        return self._processes.identities

    def let_die_alone(self) -> None:
        """Whoever built this group replaces it when it dies: calls on other groups need not fail for that."""
        self._processes.dies_alone = True

    def shutdown(self) -> None:
        """End the processes now. The slots stay reserved for another group."""
        self._processes.stop()

    def release(self) -> None:
        try:
            self.shutdown()
        finally:  # also when a second Ctrl-C ends the wait for processes
            self._pool.release()

    def take_spans(self) -> list[list[Span]]:
        return self._ask_hosts("take_spans")

    def freeze_gc(self) -> None:
        self._ask_hosts("freeze_gc")

    def _ask_hosts(self, method: str) -> list[Any]:
        """What the hosts themselves answer, by rank."""
        self._processes.check_usable()
        refs = {rank: getattr(actor, method).remote() for rank, actor in enumerate(self.workers)}
        results = self._processes.start(self.role, method, refs).wait()
        return [results[rank] for rank in range(self.world_size)]

    def _bind(self, processes: WorkerProcesses, role: str, worker_cls: type[Worker]) -> None:
        super().__init__(role, worker_cls, world_size=len(processes.actors))
        self._processes = processes

    def _launch(self, launch: Launch) -> GroupFuture:
        processes = self._processes
        processes.check_usable()
        if launch.call.role not in self._roles:
            raise ValueError(f"{self.role} are several roles in one process; call spawn({sorted(self._roles)}) first.")
        shared = _SharedArguments(launch)
        outputs, row_counts = {}, {}
        for rank in launch.ranks:
            keep = launch.batch_ranks is None or rank in launch.batch_ranks
            count = launch.batch_ranks is not None
            call = replace(launch.call, keep_result=keep, count_rows=count)
            method = processes.actors[rank].call.options(num_returns=2 if count else 1)
            refs = method.remote(call, *shared.of(rank))
            outputs[rank], row_counts[rank] = refs if count else (refs, None)
        pending = processes.start(launch.call.role, launch.call.method, outputs, rows=launch.num_rows)
        if launch.batch_ranks is None:
            return GroupFuture(pending, launch.collect)
        parts = [BatchPart(outputs[rank], row_counts[rank]) for rank in launch.batch_ranks]
        return BatchFuture(pending, launch.collect, parts, lazy=launch.arguments.padding is None)


class _SharedArguments:
    """Arguments by rank. What several ranks get is put into the object store once instead of being sent to each."""

    _SMALL = (type(None), bool, int, float, str, types.FunctionType, type)

    def __init__(self, launch: Launch) -> None:
        self._values = {}
        for rank in launch.ranks:
            args, kwargs = launch.arguments.of(rank)
            self._values[rank] = [*args, *kwargs.values()]
        uses = Counter(id(value) for values in self._values.values() for value in values)
        self._repeated = {key for key, count in uses.items() if count > 1}
        self._refs: dict[int, Any] = {}

    def of(self, rank: int) -> list[Any]:
        return [self._shared(value) for value in self._values[rank]]

    def _shared(self, value: Any) -> Any:
        import ray

        if id(value) not in self._repeated or isinstance(value, (*self._SMALL, ray.ObjectRef)):
            return value
        if id(value) not in self._refs:
            self._refs[id(value)] = ray.put(value)
        return self._refs[id(value)]


def _start_actor(slot: Slot, name: str, options: Mapping[str, Any]) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return (
        ray.remote(WorkerHost)
        .options(
            name=name,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=slot.placement_group, placement_group_bundle_index=slot.bundle_index
            ),
            **options,
        )
        .remote()
    )


def _build_workers(processes: WorkerProcesses, roles: Mapping[str, ClassWithInitArgs], pool: RayResourcePool) -> None:
    """Learn where the processes are, let rank 0 bind the store, then build the workers of all ranks side by side."""
    actors, title = processes.actors, processes.title
    known = secrets()
    starts = {rank: actor.identify.remote(known) for rank, actor in enumerate(actors)}
    identities = processes.start(title, "start", starts).wait()
    processes.identities = [identities[rank] for rank in range(len(actors))]
    nodes = [identity.node for identity in processes.identities]
    single_node = len(set(nodes)) == 1
    store_host = LOOPBACK if single_node else nodes[0]
    store_port, free_port = processes.start(title, "serve_store", {0: actors[0].serve_store.remote(store_host)}).wait()[
        0
    ]
    common = WorkerContext(
        role=title,
        world_size=len(actors),
        single_node=single_node,
        use_gpu=pool.use_gpu,
        needs_gpu=pool.use_gpu and pool.accelerator == "GPU",
        master_addr=store_host,
        master_port=free_port,
        store_port=store_port,
    )
    builds = {
        rank: actors[rank].build.remote(context, dict(roles))
        for rank, context in enumerate(_contexts(common, processes.identities))
    }
    processes.start(title, "__init__", builds).wait()


def _contexts(common: WorkerContext, identities: Sequence[ProcessIdentity]) -> list[WorkerContext]:
    seen: Counter[str] = Counter()
    totals = Counter(identity.node_id for identity in identities)
    contexts = []
    for rank, identity in enumerate(identities):
        local = {"local_rank": seen[identity.node_id], "local_world_size": totals[identity.node_id]}
        contexts.append(replace(common, rank=rank, node=identity.node, **local))
        seen[identity.node_id] += 1
    return contexts
