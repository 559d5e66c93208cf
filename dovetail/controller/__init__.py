"""How one process drives N: groups of workers on Ray, or in this process. Knows no RL.

Importing this package does not import ray: `start_ray` must come first.
"""

from dovetail.controller.cluster import start_ray, stop_ray
from dovetail.controller.context import WorkerContext
from dovetail.controller.dispatch import MeshLayout, Padding, RankArguments
from dovetail.controller.errors import WorkerDiedError, WorkerError, WorkerHungError
from dovetail.controller.futures import BatchFuture, BatchSlice, GroupFuture
from dovetail.controller.local import LocalWorkerGroup
from dovetail.controller.ray_group import RayWorkerGroup
from dovetail.controller.registration import (
    Dispatch,
    DispatchMode,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    registered_methods,
)
from dovetail.controller.resource_pool import RayResourcePool
from dovetail.controller.worker import ClassWithInitArgs, RayClassWithInitArgs, Worker, create_colocated_worker_cls
from dovetail.controller.worker_group import GroupMethod, WorkerGroup

__all__ = [
    "BatchFuture",
    "BatchSlice",
    "ClassWithInitArgs",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "GroupFuture",
    "GroupMethod",
    "LocalWorkerGroup",
    "MeshLayout",
    "Padding",
    "RankArguments",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "Worker",
    "WorkerContext",
    "WorkerDiedError",
    "WorkerError",
    "WorkerGroup",
    "WorkerHungError",
    "create_colocated_worker_cls",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "registered_methods",
    "start_ray",
    "stop_ray",
]
