"""What differs between one process, FSDP2 and FSDP1: how a module's parameters are spread. No loop, no optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dovetail.config.fsdp import WrapPolicyConfig
from dovetail.models.weights import load_weights

_HEAD_NAMES = frozenset({"lm_head", "score", "classifier"})


@dataclass(frozen=True)
class Precision:
    """Dtypes of one role. Equal ``master`` and ``compute`` means no mixed precision at all."""

    master: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    @property
    def is_mixed(self) -> bool:
        return self.compute != self.master


def is_meta(module: nn.Module) -> bool:
    """Whether the module is shapes only, with no memory behind its parameters."""
    return any(parameter.is_meta for parameter in module.parameters())


class Sharding(ABC):
    """A module whose parameters are spread over processes, and the operations that depend on how. What is not abstract
    is that of one process."""

    module: nn.Module
    """What to call for a forward pass."""
    reduce_factor: int = 1
    """By how much the loss must be multiplied for the reduction to give the sum over ranks."""
    is_unsharded: bool = False
    """Whether this process holds every parameter whole, as plain tensors."""

    @property
    def state_module(self) -> nn.Module:
        """What the optimizer steps and a checkpoint holds: ``module``, unless masters are kept apart from it."""
        return self.module

    def load_weights(self, path: Path, adapter: Path | None = None) -> None:
        """Fill the parameters from a Hugging Face folder, and LoRA's from an adapter's, tensor by tensor: no rank ever
        holds the whole model."""
        load_weights(self.state_module, path, adapter=adapter)
        self.state_changed()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, as the optimizer sees them, under the names of the module before sharding."""
        return self.state_module.named_parameters()

    def compute_context(self) -> AbstractContextManager[object]:
        """Around every forward pass: autocast where the sharding does not cast by itself."""
        return nullcontext()

    def accumulating(self) -> AbstractContextManager[object]:
        """Around forward and backward of every micro-batch but the last: no reduction of gradients."""
        return nullcontext()

    def after_forward(self) -> None:
        """Give gathered parameters back after a forward pass that no backward follows."""
        return

    def state_changed(self) -> None:
        """The parameters of ``state_module`` were written: bring ``module`` up to date."""
        return

    @abstractmethod
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients down to ``max_norm``; return the norm before, of the whole model, equal on all ranks."""

    @abstractmethod
    def full_tensors(
        self, *, gradients: bool = False, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters (or gradients) of ``state_module`` one at a time, under their names in it as it is now.

        Those ``wanted`` by name, the same on every rank; None: all.
        """

    def plain_name(self, name: str) -> str:
        """The name before sharding of a parameter of ``module``."""
        return name

    @abstractmethod
    def move_parameters(self, device: torch.device) -> None:
        """Move this rank's part of the parameters."""


def sharding_units(model: nn.Module, policy: WrapPolicyConfig) -> list[nn.Module]:
    """Units from the inside out, without the model itself: children before the modules that contain them."""
    if policy.disable:
        return []
    if policy.min_num_params > 0:
        return _units_by_size(model, policy.min_num_params)
    names = layer_class_names(model, policy)
    chosen = {module for module in model.modules() if type(module).__name__ in names}
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no module of class {', '.join(sorted(names)) or '(none declared)'}; "
            "set fsdp_config.wrap_policy.transformer_layer_cls_to_wrap to its layer classes, or disable to true"
        )
    chosen |= {module for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = _head_parameters(model)
    return [module for module in _inside_out(model) if module in chosen and not _holds(module, heads)]


def layer_class_names(model: nn.Module, policy: WrapPolicyConfig) -> frozenset[str]:
    """Classes named by the configuration, else those that the model (or a part of it) declares unsplittable."""
    if policy.transformer_layer_cls_to_wrap:
        return frozenset(policy.transformer_layer_cls_to_wrap)
    declared: set[str] = set()
    for module in model.modules():
        declared.update(getattr(module, "_no_split_modules", None) or ())
    return frozenset(declared)


def _units_by_size(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    heads = _head_parameters(model)
    taken: set[int] = set()
    units: list[nn.Module] = []
    for module in _inside_out(model):
        own = {id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in taken}
        # A list or dict of modules is never called, so nothing would gather its weights.
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if sum(own.values()) >= min_num_params and not is_container and not _holds(module, heads):
            units.append(module)
            taken |= own.keys()
    return units


def _inside_out(model: nn.Module) -> list[nn.Module]:
    return [module for module in reversed(list(model.modules())) if module is not model]


def _head_parameters(model: nn.Module) -> frozenset[int]:
    # By identity: an embedding tied to the output layer is the same parameter and must stay with it.
    heads = (module for name, module in model.named_modules() if name.split(".")[-1] in _HEAD_NAMES)
    return frozenset(id(parameter) for head in heads for parameter in head.parameters())


def _holds(module: nn.Module, parameters: frozenset[int]) -> bool:
    return any(id(parameter) in parameters for parameter in module.parameters())
