"""Runs when a Python of the CPU environment of SGLang starts (a .pth file imports it; see `make sglang-env`).

SGLang 0.5.18 imports torchvision whatever the model. The torchvision that is published for this torch is a CUDA build:
its library of operators does not load beside a CPU torch, and it then fails at `register_fake("torchvision::nms")`.
Declaring the two operators it wants to decorate is enough: no text model calls them.

On ARM, SGLang 0.5.18 takes its compiled kernels for granted when a worker starts: it binds threads to cores and sets
up an all-reduce in shared memory without asking whether the operators are there. Both are left out here; ranks add up
over gloo, as on other CPUs.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib.machinery import ModuleSpec
from typing import Any

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _BeforeTorchvision:
    """Finds nothing; notices the first import of torchvision. Importing torch at every start of Python would cost."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            # Kept alive in the module: the operators vanish with the library that declared them.
            global library
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(operator + _SCHEMA)
            if platform.machine().lower() in ("aarch64", "arm64"):
                kernels: Any = torch.ops.sgl_kernel
                kernels.init_cpu_threads_env = lambda cpus: None
                kernels.initialize = _without_shared_memory
        return None


def _without_shared_memory(size: int, rank: int) -> None:
    """SGLang reduces in shared memory where LOCAL_SIZE, which it has just set, is the size of the group."""
    os.environ.pop("LOCAL_SIZE", None)


library: Any = None
sys.meta_path.insert(0, _BeforeTorchvision())
