"""`WorkerGroup`: N workers of one role seen as one object. Does not know how its processes run.

``group.method(batch)`` dispatches the arguments by the method's registration, runs it on the ranks and collects the
results. Subclasses only launch calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dovetail.config.wording import did_you_mean
from dovetail.controller.dispatch import MeshLayout, Padding, RankArguments, dispatch_one_to_all, drop_padding
from dovetail.controller.errors import WorkerError
from dovetail.controller.futures import GroupFuture
from dovetail.controller.host import Call
from dovetail.controller.registration import Dispatch, Execute, Registration, registered_methods
from dovetail.controller.spans import Span
from dovetail.controller.worker import Worker
from dovetail.protocol import DataProto


@dataclass(frozen=True)
class Launch:
    """One call on some ranks, ready to go: what a subclass needs to know to run it."""

    call: Call
    arguments: RankArguments
    ranks: Sequence[int]
    batch_ranks: Sequence[int] | None
    collect: Callable[[dict[int, Any]], Any]

    @property
    def num_rows(self) -> int:
        """Rows of the largest batch that one rank gets."""
        shares = [value for rank in self.ranks for value in self.arguments.of(rank)[0] if isinstance(value, DataProto)]
        return max((len(share) for share in shares), default=0)


class WorkerGroup(ABC):
    """Common to all kinds of groups: registered methods as attributes, dispatch, collection, meshes."""

    takes_slices: bool
    """Whether the processes can fetch a lazy batch themselves."""

    def __init__(self, role: str, worker_cls: type[Worker], world_size: int) -> None:
        self.role = role
        self.worker_cls = worker_cls
        self.world_size = world_size
        self._methods = registered_methods(worker_cls)
        self._meshes: dict[str, MeshLayout] = {}

    @abstractmethod
    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Any]:
        """One group per role that shares the processes of this group."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the processes of the group. Groups that share them end too."""

    def release(self) -> None:
        """End the processes and give their devices back."""
        self.shutdown()

    def when_hung(self, end: Callable[[WorkerError], None]) -> None:  # noqa: B027  most groups have nothing to do
        """`end` is called, from another thread, when a call hangs in this very process. Other processes are killed, and
        their calls raise."""

    @abstractmethod
    def take_spans(self) -> list[list[Span]]:
        """The calls each process has run since this was last asked, by rank, of all roles that share the processes."""

    @abstractmethod
    def freeze_gc(self) -> None:
        """Models are built and kernels compiled: exclude them from later garbage collections."""

    @abstractmethod
    def _launch(self, launch: Launch) -> GroupFuture: ...

    def __getattr__(self, name: str) -> GroupMethod:
        # Only reached for names that are not attributes. Private lookups come before __init__ has run (copy, pickle).
        methods = self.__dict__.get("_methods", {})
        if name in methods:
            return GroupMethod(self, name, methods[name])
        if name.startswith("__") or not methods:
            raise AttributeError(name)
        if hasattr(self.worker_cls, name):
            raise AttributeError(f"{self.worker_cls.__name__}.{name} is not registered; decorate it with @register.")
        hint = did_you_mean(name, methods) or f" It has {sorted(m for m in methods if m[0] != '_')}."
        raise AttributeError(f"{self.worker_cls.__name__} (role {self.role!r}) has no method {name!r}.{hint}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._methods]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(role={self.role!r}, world_size={self.world_size})"

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method, registered or not, on all ranks with the same arguments; results by rank."""
        return self._start(method, Registration(Dispatch.ONE_TO_ALL), args, kwargs).get()

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> GroupFuture:
        """Like `execute_all_sync`, but returns a future."""
        return self._start(method, Registration(Dispatch.ONE_TO_ALL), args, kwargs)

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method, registered or not, on rank 0; its result."""
        return self._start(method, Registration(Dispatch.RANK_ZERO), args, kwargs).get()

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> GroupFuture:
        """Like `execute_rank_zero_sync`, but returns a future."""
        return self._start(method, Registration(Dispatch.RANK_ZERO), args, kwargs)

    def mesh_layout(self, mesh_name: str) -> MeshLayout:
        """Who takes which share in calls dispatched by ``mesh_name``. Asked of the workers once."""
        if mesh_name not in self._meshes:
            self._meshes[mesh_name] = MeshLayout.of_answers(
                self.role, mesh_name, self._query_dispatch_collect_info(mesh_name)
            )
        return self._meshes[mesh_name]

    def dp_size(self, mesh_name: str) -> int:
        """Number of shares a batch is split into by ``mesh_name``."""
        return len(self.mesh_layout(mesh_name).collect_ranks)

    def _start(self, method: str, registration: Registration, args: tuple, kwargs: dict[str, Any]) -> GroupFuture:
        mode = registration.dispatch_mode
        if registration.execute_mode is Execute.RANK_ZERO and mode is Dispatch.ALL_TO_ALL:
            arguments = dispatch_one_to_all(self, *args, **kwargs)  # a list of world_size entries stays one argument
        else:
            arguments = mode.dispatch(self, *args, **kwargs)
        batch_ranks = mode.batch_ranks(self) if mode.batch_ranks is not None else None
        if registration.rank_zero_only:
            collect: Callable[[dict[int, Any]], Any] = _only_rank_zero
        else:
            order = range(self.world_size) if batch_ranks is None else batch_ranks
            collect = partial(_collect, self, mode.collect_fn, order, arguments.padding)
        call = Call(
            self.role,
            method,
            len(arguments.args),
            tuple(arguments.kwargs),
            materialize_futures=registration.materialize_futures,
        )
        ranks = [0] if registration.rank_zero_only else range(self.world_size)
        return self._launch(Launch(call, arguments, ranks, batch_ranks, collect))


class GroupMethod:
    """A registered method of a group. Calling it blocks as registered; `submit` never blocks."""

    def __init__(self, group: WorkerGroup, name: str, registration: Registration) -> None:
        self.group = group
        self.name = name
        self.registration = registration

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        future = self.submit(*args, **kwargs)
        return future.get() if self.registration.blocking else future

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        """Start the call and return its future, whatever the registration says about blocking."""
        return self.group._start(self.name, self.registration, args, kwargs)

    def __repr__(self) -> str:
        return f"<method {self.name} of {self.group!r}, {self.registration.dispatch_mode.name}>"


def _only_rank_zero(outputs: dict[int, Any]) -> Any:
    return outputs[0]


def _collect(
    group: WorkerGroup,
    collect_fn: Callable[[WorkerGroup, Sequence[Any]], Any],
    order: Sequence[int],
    padding: Padding | None,
    outputs: dict[int, Any],
) -> Any:
    return drop_padding(collect_fn(group, [outputs[rank] for rank in order]), padding)
