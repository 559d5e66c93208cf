"""Put named tensors into a model that the engine owns, and account for every one of them.

Takes names in memory and names on disk, which differ where transformers stacks the experts of a mixture into one
parameter. Refuses what does not fit by name; never resizes, never skips.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from dovetail.models.weights import to_checkpoint_tensors
from dovetail.rollout.base import WeightUpdateError

_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a name's tensor goes, and which pieces of the model are complete once it is there."""

    target: torch.Tensor
    pieces: frozenset[str]
    part_of_stack: bool = False


class WeightLoader:
    """Accepts names and shapes of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._places = _places(model)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy every tensor to its place. Raises WeightUpdateError on the first misfit, or if one is missing."""
        for place, tensor in self._accounted(weights):
            place.target.copy_(tensor)

    @torch.no_grad()
    def stage(self, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Copies beside the model, on its device and in its dtypes, to be loaded later. Raises as `load` does."""
        staged = {}

        def copied() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                place = self._places.get(name)
                like = tensor if place is None else place.target
                staged[name] = tensor.to(device=like.device, dtype=like.dtype, copy=True)
                yield name, tensor

        for _ in self._accounted(copied()):
            pass
        return staged

    def check_shared(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """For a model that reads the trainer's memory: every tensor must be the one in place. Copies nothing.

        Experts under their names on disk arrive as copies of parts of the shared memory; only their shapes are checked.
        """
        for place, tensor in self._accounted(weights):
            if not place.part_of_stack and tensor.data_ptr() != place.target.data_ptr():
                raise WeightUpdateError(
                    f"the tensor sent for {', '.join(place.pieces)} is not the memory this engine shares with the "
                    "trainer; change the shared weights in place and call update_weights(None, version)."
                )

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """What the model holds under these names, as far as it has them."""
        return {name: self._places[name].target for name in names if name in self._places}

    def _accounted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[_Place, torch.Tensor]]:
        missing = frozenset().union(*(place.pieces for place in self._places.values()))
        for name, tensor in weights:
            place = self._places.get(name)
            if place is None:
                raise WeightUpdateError(f"the engine's model has no tensor {name!r} (shape {tuple(tensor.shape)}).")
            if tensor.shape != place.target.shape:
                raise WeightUpdateError(
                    f"tensor {name!r} has shape {tuple(tensor.shape)}; the engine's model has it with shape "
                    f"{tuple(place.target.shape)}."
                )
            yield place, tensor
            missing -= place.pieces
        if missing:
            names = sorted(missing)
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            raise WeightUpdateError(f"no tensor was given for {', '.join(names[:_MAX_NAMED])}{more}.")


def _places(model: PreTrainedModel) -> dict[str, _Place]:
    parameters = list(model.named_parameters(remove_duplicate=False))
    parts = _parts_on_disk(model)
    first_name: dict[int, str] = {}
    places: dict[str, _Place] = {}
    for name, parameter in parameters:
        # Tied parameters are one piece under two names: either completes it, both are accepted.
        own = first_name.setdefault(id(parameter), name)
        places[name] = _Place(parameter.data, frozenset(parts[name]) if len(parts[name]) > 1 else frozenset([own]))
        for disk_name, target in parts[name].items():
            pieces = frozenset([disk_name]) if len(parts[name]) > 1 else frozenset([own])
            places.setdefault(disk_name, _Place(target, pieces, part_of_stack=len(parts[name]) > 1))
    # Buffers of a checkpoint (the bias of a sigmoid router) may be sent too; none is required: they are not trained.
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored:
            places.setdefault(name, _Place(buffer, frozenset()))
    return places


def _parts_on_disk(model: PreTrainedModel) -> dict[str, dict[str, torch.Tensor]]:
    """For each parameter the views of it that its checkpoint tensors fill.

    transformers' own conversion is run on row numbers instead of weights; the numbers that come out under a name on
    disk tell which rows of which parameter it holds. A conversion that does more than rename and cut gives no view, and
    its names on disk are not taken.
    """
    names, probes, firsts, total = [], [], [], 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.append(name)
        firsts.append(total)
        probes.append((name, _row_numbers(parameter, total)))
        total += _rows(parameter).shape[0]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parts: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
    for disk_name, probe in to_checkpoint_tensors(model, probes):
        numbers = probe[..., 0] if probe.ndim > 1 else probe
        low, count = int(numbers.flatten()[0]), numbers.numel()
        if torch.equal(numbers.flatten(), torch.arange(low, low + count)):
            index = bisect.bisect_right(firsts, low) - 1
            rows = _rows(parameters[names[index]].data)[low - firsts[index] :][:count]
            parts[names[index]][disk_name] = rows.unflatten(0, numbers.shape)
    return parts


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor


def _row_numbers(parameter: torch.Tensor, first: int) -> torch.Tensor:
    """`parameter` with two columns, both holding the running number of the row (one column might be squeezed away)."""
    numbers = torch.arange(first, first + _rows(parameter).shape[0])
    if parameter.ndim == 1:
        return numbers
    return numbers.view(*parameter.shape[:-1], 1).expand(*parameter.shape[:-1], 2).contiguous()
