"""The optimizer, over two groups of parameters: with weight decay and without. Knows no sharding and no schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from dovetail.config.optim import OptimConfig

# Of the odd polynomial a x + b x^3 + c x^5, which takes singular values of (0, 1] near 1 in five steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_DTYPE = torch.bfloat16
_EPSILON = 1e-7


def muon_names(network: nn.Module) -> frozenset[str]:
    """Names of the matrices inside the layers: not embeddings, not a head over vocabulary or labels."""
    outside: set[int] = set()
    for module in network.modules():
        if isinstance(module, nn.Embedding):
            outside.add(id(module.weight))
        if isinstance(module, PreTrainedModel) and (head := module.get_output_embeddings()) is not None:
            outside.add(id(head.weight))
        if isinstance(score := getattr(module, "score", None), nn.Linear):
            outside.add(id(score.weight))
    return frozenset(
        name for name, parameter in network.named_parameters() if parameter.dim() == 2 and id(parameter) not in outside
    )


class Muon(torch.optim.Optimizer):
    """`groups` with `use_muon=True` hold matrices, the others are stepped by AdamW. One learning rate for both."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        num_ns_steps: int = 5,
        adjust_lr_fn: str = "original",
        **adamw: Any,
    ) -> None:
        own = {"momentum": momentum, "nesterov": nesterov, "num_ns_steps": num_ns_steps, "adjust_lr_fn": adjust_lr_fn}
        matrices, others = [], []
        for group in groups:
            if group["use_muon"]:
                matrices.append({**group, "lr": lr, **own})
            else:
                others.append({**group, "lr": lr})
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, **adamw) if others else None
        super().__init__([*matrices, *(self._adamw.param_groups if self._adamw is not None else [])], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            if group["use_muon"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_matrix(parameter, group)
        if self._adamw is not None:
            # Loading a state replaces groups and state: AdamW must step those that a checkpoint sees.
            self._adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def _step_matrix(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum, gradient = group["momentum"], parameter.grad
        assert gradient is not None, "only called with one"
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = _orthogonal_like(direction, group["num_ns_steps"]).to(parameter.dtype)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * scale_of(parameter.shape, group["adjust_lr_fn"]))


def scale_of(shape: torch.Size, adjust_lr_fn: str) -> float:
    """Factor of the learning rate: `original` by the shape, `match_rms_adamw` for steps as large as AdamW's."""
    rows, columns = shape
    return (
        0.2 * math.sqrt(max(rows, columns)) if adjust_lr_fn == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
    )


def orthogonalise(matrix: Tensor, num_steps: int) -> Tensor:
    """Nearly U V^T of the matrix U S V^T: singular values end between about 0.7 and 1.2."""
    a, b, c = _COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = (matrix.t() if tall else matrix).to(_DTYPE)
    x = x / x.norm().clamp(min=_EPSILON)
    for _ in range(num_steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if tall else x


def _orthogonal_like(direction: Tensor, num_steps: int) -> Tensor:
    """Of the whole matrix; a part of it in, the same part out."""
    if not isinstance(direction, DTensor):
        return orthogonalise(direction, num_steps)
    full = orthogonalise(direction.full_tensor(), num_steps)
    # Every rank has computed all of it: cut, nothing is sent.
    return distribute_tensor(full.contiguous(), direction.device_mesh, direction.placements, src_data_rank=None)


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
