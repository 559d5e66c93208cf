"""Which device a worker computes on. Starts none of them."""

from __future__ import annotations

import os

from dovetail.controller.context import WorkerContext


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
