"""Put named tensors into a model that the engine owns.

Takes names in memory and names on disk, which differ where transformers stacks the experts of a mixture into one
parameter. Refuses what does not fit by name; never resizes, never skips.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from dovetail.models.weights import to_checkpoint_tensors
from dovetail.rollout.base import WeightUpdateError
from dovetail.rollout.expected import CheckedWeights, shapes_of, stored_buffers, tied_parameters
from dovetail.weight_sync import ExpectedWeights, NamedTensors


class WeightLoader:
    """Accepts names and shapes of one model. What does not fit, or is missing, is a WeightUpdateError."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._targets: dict[str, torch.Tensor] = {}
        ties: dict[str, str] = {}
        stacks: dict[str, tuple[str, ...]] = {}
        tied = tied_parameters(model)
        parts = _parts_on_disk(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._targets[name] = parameter.data
            if own := tied.get(name):
                ties.update(dict.fromkeys({name, *parts[name]} - {own, *parts[own]}, own))
            elif parts[name].keys() - {name}:
                stacks[name] = tuple(parts[name])
        for on_disk in parts.values():
            self._targets = on_disk | self._targets
        buffers = stored_buffers(model)
        shapes, optional = shapes_of(self._targets.items()), shapes_of(buffers.items())
        self._expected = ExpectedWeights(shapes, ties, optional, stacks)
        self._targets = buffers | self._targets

    @torch.no_grad()
    def load(self, weights: NamedTensors) -> None:
        """Copy every tensor to its place."""
        with CheckedWeights(weights, self._expected) as checked:
            for name, tensor in checked:
                self._targets[name].copy_(tensor)

    @torch.no_grad()
    def stage(self, weights: NamedTensors) -> dict[str, torch.Tensor]:
        """Copies beside the model, on its device and in its dtypes, to be loaded later."""
        staged = {}
        with CheckedWeights(weights, self._expected) as checked:
            for name, tensor in checked:
                target = self._targets[name]
                staged[name] = tensor.to(device=target.device, dtype=target.dtype, copy=True)
        return staged

    def check_shared(self, weights: NamedTensors) -> None:
        """For a model that reads the trainer's memory: every tensor must be the one in place. Copies nothing.

        Experts under their names on disk arrive as copies of parts of the shared memory; only their shapes are checked.
        """
        copies = {part for parts in self._expected.stacks.values() for part in parts}
        with CheckedWeights(weights, self._expected) as checked:
            for name, tensor in checked:
                if name not in copies and tensor.data_ptr() != self._targets[name].data_ptr():
                    raise WeightUpdateError(
                        f"the tensor sent for {name} is not the memory this engine shares with the trainer; change the "
                        "shared weights in place and call update_weights(None, version)."
                    )

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """What the model holds under these names, as far as it has them."""
        return {name: self._targets[name] for name in names if name in self._targets}


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
