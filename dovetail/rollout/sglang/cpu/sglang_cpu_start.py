"""Runs when a Python of the CPU environment of SGLang starts (a .pth file imports it; see `make sglang-env`).

SGLang 0.5.18 imports torchvision whatever the model. The torchvision that is published for this torch is a CUDA build:
its library of operators does not load beside a CPU torch, and it then fails at `register_fake("torchvision::nms")`.
Declaring the two operators it wants to decorate is enough: no text model calls them.
"""

from __future__ import annotations

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
        return None


library: Any = None
sys.meta_path.insert(0, _BeforeTorchvision())
