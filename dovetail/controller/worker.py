"""`Worker`: the base of every role. Knows its place in the group and how to meet its peers; knows no RL.

A worker class and the arguments to build it with travel as `ClassWithInitArgs`; several of them can share a process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dovetail.controller import rendezvous
from dovetail.controller.context import context_for_new_worker, device_index
from dovetail.controller.registration import Dispatch, Execute, register

if TYPE_CHECKING:
    import torch


class Worker:
    """One role in one process. Subclasses call ``super().__init__()`` first and mark their methods with `register`.

    The same class runs in a Ray actor (`RayWorkerGroup`), in this process (`LocalWorkerGroup`), under torchrun, or
    by itself as a world of one.
    """

    def __init__(self) -> None:
        self.context = context_for_new_worker(type(self).__name__)
        self.colocated: Mapping[str, Worker] = {self.context.role: self}
        """The roles that share this process, by name; filled once all of them are built."""
        self._meshes: dict[str, tuple[int, bool]] = {}

    @property
    def role(self) -> str:
        return self.context.role

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this group on this node."""
        return self.context.local_rank

    @property
    def local_world_size(self) -> int:
        return self.context.local_world_size

    @property
    def master_addr(self) -> str | None:
        """The node of rank 0, as the others reach it; see `dovetail.controller.rendezvous`."""
        return self.context.master_addr

    @property
    def master_port(self) -> int | None:
        """A port of rank 0's node that is kept free for this group."""
        return self.context.master_port

    @property
    def device(self) -> torch.device:
        """The GPU of this process when its pool has GPUs and there is one, else the CPU.

        A process that Ray has promised a GPU and that sees none is an error, never a rank on the CPU.
        """
        import torch

        index = device_index(self.context)
        return torch.device("cpu") if index is None else torch.device("cuda", index)

    def init_process_group(
        self, backend: str | None = None, *, timeout: timedelta = rendezvous.COLLECTIVE_TIMEOUT
    ) -> None:
        """Join the default process group of this group's ranks. Roles that share a process share the group.

        ``backend`` defaults to NCCL (and gloo for CPU tensors) with a GPU, gloo without.
        """
        import torch

        device = self.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        default = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        rendezvous.init_process_group(self.context, backend or default, device=device, timeout=timeout)

    def close(self) -> None:
        """The group ends and this process lives on: end what does not end with the worker, such as servers."""

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Say which share of a batch this rank takes in calls dispatched by ``mesh_name``.

        ``is_collect`` is true on exactly one rank of each data-parallel rank: its result is the one that counts.
        """
        known = self._meshes.setdefault(mesh_name, (dp_rank, is_collect))
        if known != (dp_rank, is_collect):
            raise ValueError(
                f"mesh {mesh_name!r} of {self.role}[rank {self.rank}] is registered as (dp_rank, is_collect)={known}; "
                f"it cannot become {(dp_rank, is_collect)}, groups have already dispatched by it. Use another name."
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_collect_info(self, mesh_name: str) -> tuple[int, bool]:
        if mesh_name not in self._meshes:
            raise ValueError(
                f"{self.role} has no mesh {mesh_name!r} (registered: {sorted(self._meshes) or 'none'}); call "
                "_register_dispatch_collect_info before the first call that dispatches by it, as a rule in init_model."
            )
        return self._meshes[mesh_name]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``func(worker, *shares)`` on every rank and concatenate the batches it returns."""
        return func(self, *args, **kwargs)

    def execute_func(self, func: Callable[..., Any], *args: Any) -> Any:
        """Run ``func(*args)`` in the process of every rank: `group.execute_all_sync("execute_func", func, ...)`."""
        return func(*args)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``func(*args)`` in the process of rank 0."""
        return func(*args, **kwargs)


class ClassWithInitArgs:
    """A worker class with its constructor's arguments. Calling it builds the worker in this process."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = _plain_class(cls)
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Worker:
        return self.cls(*self.args, **self.kwargs)

    def roles(self, default_name: str | None = None) -> dict[str, ClassWithInitArgs]:
        """The roles that one process built from this will host."""
        return {default_name or self.cls.__name__: self}


class RayClassWithInitArgs(ClassWithInitArgs):
    """Also carries options for the Ray actor. Takes a plain class or one that ``ray.remote`` has wrapped."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self.options: dict[str, Any] = {}


class ColocatedClasses(RayClassWithInitArgs):
    """Several roles for one process. Made by `create_colocated_worker_cls`."""

    def __init__(self, classes: Mapping[str, ClassWithInitArgs]) -> None:
        super().__init__(Worker)
        self.classes = dict(classes)
        for spec in self.classes.values():
            self.options |= getattr(spec, "options", {})

    def __call__(self) -> Worker:
        raise TypeError(f"{sorted(self.classes)} share a process; give them to a worker group and spawn() the roles.")

    def roles(self, default_name: str | None = None) -> dict[str, ClassWithInitArgs]:
        return dict(self.classes)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ColocatedClasses:
    """Put several roles into one process per rank; ``group.spawn(roles)`` then gives one group per role."""
    if not class_dict:
        raise ValueError("create_colocated_worker_cls got no classes; pass {role: RayClassWithInitArgs(...)}.")
    return ColocatedClasses(class_dict)


def _plain_class(cls: Any) -> type[Worker]:
    metadata = getattr(cls, "__ray_metadata__", None)  # what ray.remote leaves on the classes it wraps
    if metadata is not None:
        cls = metadata.modified_class
        cls = getattr(cls, "__ray_actor_class__", cls)
    if not (isinstance(cls, type) and issubclass(cls, Worker)):
        raise TypeError(f"{cls!r} is not a subclass of dovetail.controller.Worker; derive it from Worker.")
    return cls
