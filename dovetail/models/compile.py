"""Compile a model's layers, one by one: the element-wise work of a layer becomes a few kernels. Changes no result
beyond rounding.

Layers share one compiled program because they run the same code. Token counts differ between micro-batches, so shapes
are dynamic from the start. Packed attention stays outside the graphs: its argument list is different every time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn


def compile_layers(hf_model: Any) -> int:
    """Compile every decoder layer in place; returns how many. Call it before FSDP wraps them."""
    names = set(hf_model._no_split_modules or ())
    layers: list[nn.Module] = [module for module in hf_model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(hf_model).__name__} declares no layer classes to compile; set use_torch_compile=False for it."
        )
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)


def uncompiled() -> AbstractContextManager[None]:
    """Compiled modules run as they are written inside this block, and nothing is compiled."""
    return torch.compiler.set_stance("force_eager")
