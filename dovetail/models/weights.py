"""Weights between safetensors files and models, one tensor at a time.

Checkpoint names are not always parameter names: transformers fuses, splits and renames (experts of a mixture are one
3-D parameter in memory and one matrix each on disk). Its own conversion tables are used in both directions, so folders
written here are what everyone else reads and writes. Refuses formats other than safetensors.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from dovetail.config.adapter import ADAPTER_PREFIX, ADAPTER_WEIGHTS
from dovetail.models.errors import ModelError
from dovetail.models.files import INDEX, open_safetensors, read_index, safetensors_files

# TRL stores a value head beside the language model; transformers calls the same layer `score`.
_TRL_VALUE_HEAD = {"v_head.summary.weight": "score.weight", "v_head.summary.bias": "score.bias"}
_HEADS = ("score.weight", "score.bias", "classifier.weight", "classifier.bias")
LORA_BASE = ".base_layer."
"""What peft puts into the name of a layer it wraps."""
ADAPTER = "default"
"""The name of the adapter that is trained. peft has it in the names of parameters, and not in those of files."""


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor in a file. Nothing is read until `load`."""

    name: str
    shape: tuple[int, ...]
    handle: Any
    """The open file; it stays open, mapped, as long as a tensor of it may be read. None: only its shape is wanted."""

    def load(self) -> Tensor:
        return torch.empty(self.shape, device="meta") if self.handle is None else self.handle.get_tensor(self.name)


def iter_checkpoint_tensors(path: str | Path) -> Iterator[tuple[str, CheckpointTensor]]:
    """Every tensor of a checkpoint folder under its name on disk, in natural order; reads headers only."""
    tensors: dict[str, CheckpointTensor] = {}
    folder = Path(path).expanduser()
    index = read_index(folder)
    for file in safetensors_files(folder, index):
        handle = open_safetensors(file, framework="pt")
        for name in handle.keys():  # noqa: SIM118  not a dict
            tensors[name] = CheckpointTensor(name, tuple(handle.get_slice(name).get_shape()), handle)
    if lost := [name for name in index if name not in tensors]:
        raise ModelError(
            f"{folder / INDEX} says that {lost[0]} is in {index[lost[0]]}, which does not hold it ({len(lost)} such "
            "tensors); download or export the folder again."
        )
    yield from sorted(tensors.items(), key=lambda item: dot_natural_key(item[0]))


def unread_tensors(hf_model: PreTrainedModel, path: str | Path) -> list[str]:
    """Names on disk of the tensors that `hf_model` has no place for; reads headers only."""
    tensors = dict(iter_checkpoint_tensors(path))
    read: set[str] = set()
    _plan(hf_model, tensors, hf_model.state_dict(), read)
    return [name for name in tensors if name not in read]


def lacks_head(hf_model: PreTrainedModel, path: str | Path) -> bool:
    """Whether `hf_model` has a scalar head that `path` holds no weights for, so that `load_weights` makes a new one."""
    stored = (_TRL_VALUE_HEAD.get(name, name) for name, _ in iter_checkpoint_tensors(path))
    has_head = any(name.endswith(_HEADS) for name in hf_model.state_dict())
    return has_head and not any(name.endswith(_HEADS) for name in stored)


def iter_model_tensors(
    hf_model: PreTrainedModel, path: str | Path, *, only: Container[str] | None = None, headers_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint under its parameter name in `hf_model`, converted, read one at a time.

    Tensors the model has no place for (a language head under a critic) are left out. Names are those without LoRA. With
    `only`, no other tensor is read; with `headers_only` none is, and all are on the meta device.
    """
    tensors = dict(iter_checkpoint_tensors(path))
    if headers_only:
        tensors = {name: replace(tensor, handle=None) for name, tensor in tensors.items()}
    wanted = {name.replace(LORA_BASE, "."): place for name, place in hf_model.state_dict().items()}
    for transform, name in _plan(hf_model, tensors, wanted, set()).values():
        if only is not None and name not in only:
            continue
        for target, value in transform.convert(name, model=hf_model, config=hf_model.config).items():
            if target in wanted:
                yield target, value[0] if isinstance(value, list) else value


@torch.no_grad()
def load_weights(
    module: nn.Module, path: str | Path, *, adapter: Path | None = None, headers_only: bool = False
) -> None:
    """Fill `module` (a wrapper of `dovetail.models`, FSDP2-sharded or not) from a checkpoint folder, and its LoRA
    matrices from the folder of an `adapter`, which must have all of them.

    Every rank reads every tensor in turn and keeps its own shard, so the peak is one tensor. A scalar head and LoRA
    matrices the checkpoint does not have start from a fixed seed, alike on all ranks; any other missing tensor is an
    error, and so is a number that is not finite. On the meta device nothing is filled, only compared; with
    `headers_only` names and shapes are, and no tensor is read.
    """
    hf_model = module.hf_model
    assert isinstance(hf_model, PreTrainedModel), f"hf_model of {type(module).__name__} is no transformers model"
    targets = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    plain_names = {name.replace(LORA_BASE, "."): name for name in targets}
    missing = {name for name, _ in module.named_parameters()} | _persistent_buffers(module)
    for name, tensor in iter_model_tensors(hf_model, path, headers_only=headers_only):
        target = plain_names[f"hf_model.{name}"]
        missing.discard(target)
        _fill(targets[target], tensor, name, path)
    for name, tensor in _outer_head(path):  # a head the wrapper owns, not the transformers model
        if name in missing:
            missing.discard(name)
            _fill(targets[name], tensor, name, path)
    if adapter is not None:
        missing -= _load_adapter(targets, adapter, headers_only=headers_only)
    filled = {id(targets[name]) for name in targets if name not in missing}
    for name in sorted(missing):
        if id(targets[name]) not in filled:  # else it is tied to one that was there
            _fill(targets[name], _fresh(name, targets[name], path), name, path)


def _load_adapter(targets: Mapping[str, Tensor], folder: Path, *, headers_only: bool) -> set[str]:
    """Fill the LoRA matrices of `targets`, and a scalar head that was trained with them; returns their names."""
    handle = open_safetensors(folder / ADAPTER_WEIGHTS, framework="pt")
    filled = set()
    for stored in handle.keys():  # noqa: SIM118  not a dict
        name = stored.removeprefix(ADAPTER_PREFIX)
        for matrix in ("lora_A", "lora_B"):
            name = name.replace(f".{matrix}.weight", f".{matrix}.{ADAPTER}.weight")
        target = next((each for each in (f"hf_model.{name}", name) if each in targets), None)
        if target is None:
            raise ModelError(
                f"{folder}: its tensor {stored} has no place in this model with the adapters of target_modules; is it "
                "the adapter of another model? Its own target_modules are taken where none are set."
            )
        tensor = torch.empty(handle.get_slice(stored).get_shape(), device="meta") if headers_only else None
        _fill(targets[target], handle.get_tensor(stored) if tensor is None else tensor, name, folder)
        filled.add(target)
    if lacking := sorted(name for name in targets if ".lora_" in name and name not in filled):
        raise ModelError(
            f"{folder} holds no weights for {lacking[0]} ({len(lacking)} such tensors), which target_modules ask for; "
            "take target_modules and exclude_modules out: the adapter has its own."
        )
    return filled


def remember_prefixes(hf_model: PreTrainedModel, path: str | Path) -> None:
    """Keep which conversions the names of a folder need, as `from_pretrained` does: a text-only checkpoint may have the
    prefix of its multimodal parent or not, and `to_checkpoint_tensors` writes names as the folder has them."""
    mapping = _conversions(hf_model)
    if not any(isinstance(t, PrefixChange) for t in mapping):
        return
    wanted = hf_model.state_dict()
    for name, _ in iter_checkpoint_tensors(path):
        _name_in_memory(name, mapping, hf_model.base_model_prefix, wanted)
    used: Any = [t for t in mapping if t.was_used()]
    hf_model._weight_conversions = used


def to_checkpoint_tensors(
    hf_model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Full parameters under their names in memory to tensors under their names on disk; the opposite of loading.

    A parameter that is split on disk (experts) comes out in pieces; nothing else is held back or gathered.
    """
    transforms = [t.reverse_transform() for t in reversed(_conversions_to_disk(hf_model))]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: t for t in converters for pattern in t.source_patterns}
    waiting: dict[str, Any] = {}
    for name, tensor in weights:
        renamed, pattern = rename_source_key(name, renamings, converters, reverse=True)
        if pattern is None:
            yield renamed, tensor
            continue
        transform = waiting.setdefault(renamed, deepcopy(by_pattern[pattern]))
        transform.add_tensor(renamed, name, pattern, tensor)
        if len(transform.collected_tensors) < len(transform.source_patterns):
            continue
        for target, value in waiting.pop(renamed).convert(renamed, model=hf_model, config=hf_model.config).items():
            yield target, value[0] if isinstance(value, list) else value
    assert not waiting, f"parameters that are one tensor on disk did not all arrive: {sorted(waiting)}"


def scalar_head(path: str | Path | None, name: str, shape: tuple[int, ...]) -> Tensor:
    """`score.weight` or `score.bias` of a folder; what it does not have (and all, without one) starts as in
    `load_weights`."""
    stored = None if path is None else dict(_outer_head(path)).get(name)
    if stored is not None:
        return stored.view(shape)
    return _fresh(f"hf_model.{name}", torch.empty(shape, device="meta"), path or "")


def _plan(
    hf_model: PreTrainedModel, tensors: dict[str, CheckpointTensor], wanted: dict[str, Any], used: set[str]
) -> dict[str, tuple[Any, str]]:
    """For each parameter (the first, when one tensor makes several): the conversion that reads its sources.

    The names of these sources are added to `used`.
    """
    mapping = _conversions(hf_model)
    by_pattern = {pattern: t for t in mapping if isinstance(t, WeightConverter) for pattern in t.source_patterns}
    prefix = hf_model.base_model_prefix
    plan: dict[str, tuple[Any, str]] = {}
    for name, tensor in tensors.items():
        source = _TRL_VALUE_HEAD.get(name, name)
        target, pattern = _name_in_memory(source, mapping, prefix, wanted)
        if target not in wanted and source in wanted:
            target, pattern = source, None
        if target not in wanted:
            continue
        used.add(name)
        made: Any = deepcopy(by_pattern[pattern]) if pattern is not None else WeightRenaming(name, target)
        transform, _ = plan.setdefault(target, (made, target))
        read: Callable[[], Tensor] = tensor.load
        transform.add_tensor(target, name, pattern or name, read)  # pyrefly: ignore[bad-argument-type]
    return plan


def _conversions(hf_model: PreTrainedModel, add_legacy: bool = True) -> list[Any]:
    return list(get_model_conversion_mapping(hf_model, add_legacy=add_legacy))


def _name_in_memory(name: str, mapping: Sequence[Any], prefix: str, wanted: dict[str, Any]) -> tuple[str, str | None]:
    renamings = [t for t in mapping if isinstance(t, WeightRenaming)]
    converters = [t for t in mapping if isinstance(t, WeightConverter)]
    return rename_source_key(name, renamings, converters, prefix, wanted)


def _conversions_to_disk(hf_model: PreTrainedModel) -> list[Any]:
    """All but prefixes that the folder has not: `remember_prefixes`. Without a folder there are none."""
    used = [_prefix_of(t) for t in getattr(hf_model, "_weight_conversions", None) or ()]
    conversions = _conversions(hf_model, add_legacy=False)
    return [t for t in conversions if not isinstance(t, PrefixChange) or _prefix_of(t) in used]


def _prefix_of(conversion: Any) -> tuple[str | None, ...]:
    names = ("prefix_to_add", "prefix_to_remove", "model_prefix", "scope_prefix")
    return tuple(getattr(conversion, name, None) for name in names)


def _outer_head(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in iter_checkpoint_tensors(path):
        target = _TRL_VALUE_HEAD.get(name, name)
        if target in _HEADS:
            yield target, tensor.load()


def refuse_not_finite(tensor: Tensor, name: str, path: str | Path) -> None:
    """One pass: a sum is finite only where all of its terms are, and weights are far from overflowing float32."""
    if tensor.is_meta or not tensor.is_floating_point() or math.isfinite(tensor.sum(dtype=torch.float32).item()):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise ModelError(
            f"{path}: {bad} of the {tensor.numel()} numbers of {name} are NaN or infinite; export the weights again "
            "from a checkpoint that works."
        )


def _fill(target: Tensor, tensor: Tensor, name: str, path: str | Path) -> None:
    if tuple(target.shape) != tuple(tensor.shape):
        raise ModelError(
            f"{path}: {name} has shape {tuple(tensor.shape)} on disk and {tuple(target.shape)} in the network that "
            "config.json describes; is it another model's?"
        )
    if not target.is_meta:
        tensor = tensor.to(target.device)  # a GPU looks through the numbers in a hundredth of the time
    refuse_not_finite(tensor, name, path)
    if isinstance(target, DTensor):
        local = tensor.to(target.dtype)
        # src_data_rank=None: every rank cuts its own shard out of what it read, nothing is sent.
        target.copy_(distribute_tensor(local, target.device_mesh, target.placements, src_data_rank=None))
    else:
        target.copy_(tensor)


def _fresh(name: str, like: Tensor, path: str | Path) -> Tensor:
    """Start values for what may be missing. The seed is the name's, so ranks agree without speaking."""
    shape = tuple(like.shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if ".lora_A." in name:
        bound = shape[-1] ** -0.5  # peft's own: Kaiming-uniform with a = sqrt(5)
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if ".lora_" in name or (name.endswith(_HEADS) and len(shape) == 1):
        return torch.zeros(shape)
    if name.endswith(_HEADS):
        return torch.normal(0.0, 0.02, shape, generator=generator)
    raise ModelError(f"{path} holds no weights for {name}; is it another model?")


def _persistent_buffers(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_buffers()} & module.state_dict().keys()
