"""Who am I among the processes of my group, and which device is mine? Plain data given to a worker when it is built."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerContext:
    """Place of one worker in its group. ``use_gpu`` permits a GPU; ``needs_gpu`` says that Ray has promised one.

    ``store_port`` is where rank 0 already serves the group's key-value store on ``master_addr``. ``master_port`` is
    kept free on rank 0's node, for libraries that call ``torch.distributed.init_process_group()`` with no arguments.
    """

    role: str = "worker"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: str = "localhost"
    single_node: bool = True
    use_gpu: bool = True
    needs_gpu: bool = False
    master_addr: str | None = None
    master_port: int | None = None
    store_port: int | None = None

    def env(self, device_index: int | None = None) -> dict[str, str]:
        """The variables that torch and its users expect to find in the process environment.

        ``LOCAL_RANK`` is what libraries make a device of (``cuda:LOCAL_RANK``): the index of this process's device
        among those it sees, which under Ray is one. The rank on the node is ``RAY_LOCAL_RANK``.
        """
        env = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank if device_index is None else device_index),
            "RAY_LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
        }
        if self.master_addr is not None:
            env |= {"MASTER_ADDR": self.master_addr, "MASTER_PORT": str(self.master_port)}
        return env


@contextmanager
def building(context: WorkerContext) -> Iterator[None]:
    """Workers constructed inside this block take ``context`` as theirs."""
    token = _BUILDING.set(context)
    try:
        yield
    finally:
        _BUILDING.reset(token)


def context_for_new_worker(role: str) -> WorkerContext:
    """The context set by :func:`building`, else the one that torchrun put in the environment, else a world of one."""
    context = _BUILDING.get()
    if context is not None:
        return context
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return WorkerContext(role=role)
    port = os.environ.get("MASTER_PORT")
    return WorkerContext(
        role=role,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        master_addr=os.environ.get("MASTER_ADDR"),
        master_port=int(port) if port else None,
        store_port=int(port) if port else None,
        single_node=os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"],
    )


_BUILDING: contextvars.ContextVar[WorkerContext | None] = contextvars.ContextVar("worker_context", default=None)


class MissingGpuError(RuntimeError):
    """Ray counts a GPU for this process, and torch sees none."""


def device_index(context: WorkerContext) -> int | None:
    """The index of this process's GPU among those it sees; None: it computes on the CPU.

    Ray shows each actor its own GPU only; torchrun shows all of them.
    """
    if not context.use_gpu:
        return None
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > 0:
        return context.local_rank if count > 1 else 0
    if context.needs_gpu:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise MissingGpuError(
            f"{context.role}[rank {context.rank}] on node {context.node} was promised a GPU and sees none "
            f"(CUDA_VISIBLE_DEVICES={visible!r}, torch {torch.__version__} built for CUDA {torch.version.cuda}). Start "
            "Ray on that node with the number of GPUs it has, check nvidia-smi and the torch there, or set "
            "trainer.device=cpu."
        )
    return None
