"""The optimizer, over two groups of parameters: with weight decay and without. Knows no sharding and no schedule."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from dovetail.backends.muon import Muon
from dovetail.config.optim import OptimConfig


def decayed_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay applies to: matrices, not norm scales or biases.

    Asked before sharding: a sharding that flattens parameters (FSDP1) loses their shapes.
    """
    return frozenset(name for name, parameter in module.named_parameters() if parameter.dim() >= 2)


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimConfig,
    *,
    decayed: Collection[str],
    matrices: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Parameters named in ``decayed`` get the weight decay, the others none; frozen parameters are left out.

    Muon steps those named in ``matrices``, and AdamW the others.
    """
    trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter; unfreeze some, or build the backend without optim")
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in trainable if name in decayed], "weight_decay": config.weight_decay},
        {"params": [p for name, p in trainable if name not in decayed], "weight_decay": 0.0},
    ]
    if config.optimizer == "Muon":
        return _build_muon(trainable, config, decayed, matrices)
    groups = [group for group in groups if group["params"]]
    # One kernel per step on CUDA, one per tensor list elsewhere: the arithmetic is the same.
    on_cuda = all(parameter.device.type == "cuda" for _, parameter in trainable)
    shared: dict[str, Any] = {"lr": config.lr, "fused": on_cuda, "foreach": not on_cuda}
    if config.optimizer == "SGD":
        arguments = shared | {"momentum": config.momentum}
    else:
        arguments = shared | {"betas": config.betas, "eps": config.eps}
    arguments |= config.override_optimizer_config or {}
    return _OPTIMIZERS[config.optimizer](groups, **arguments)


def _build_muon(
    trainable: list[tuple[str, nn.Parameter]], config: OptimConfig, decayed: Collection[str], matrices: Collection[str]
) -> torch.optim.Optimizer:
    by_kind: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in trainable:
        by_kind.setdefault((name in matrices, name in decayed), []).append(parameter)
    groups = [
        {"params": params, "use_muon": is_matrix, "weight_decay": config.weight_decay if decays else 0.0}
        for (is_matrix, decays), params in sorted(by_kind.items(), key=lambda kind: kind[0], reverse=True)
    ]
    flat = [name for name, parameter in trainable if name in matrices and parameter.dim() != 2]
    if flat:
        raise ValueError(
            f"optim.optimizer=Muon needs whole matrices, and the sharding has flattened {flat[0]}; use strategy=fsdp2."
        )
    return Muon(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, momentum=config.muon_momentum,
        nesterov=config.muon_nesterov, num_ns_steps=config.muon_num_ns_steps, adjust_lr_fn=config.muon_adjust_lr_fn,
        **(config.override_optimizer_config or {}),
    )  # fmt: skip


_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
}
