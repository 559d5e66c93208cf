"""Put named tensors into a model that the engine owns, and account for every one of them.

Takes the module's own names and, for mixture-of-experts models whose experts are stacked in memory, the one-expert-a-
tensor names of their checkpoints. Refuses what does not fit by name; never resizes, never skips.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from dovetail.rollout.base import WeightUpdateError

_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a name's tensor goes, and which pieces of the model are complete once it is there."""

    target: torch.Tensor
    pieces: frozenset[str]


class WeightLoader:
    """Accepts names and shapes of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._places = dict(_places(model))

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy every tensor to its place. Raises WeightUpdateError on the first misfit, or at the end on a gap."""
        self._walk(weights, copy=True)

    def check_shared(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """For a model that shares the trainer's memory: every tensor must already be the one in place."""
        self._walk(weights, copy=False)

    def _walk(self, weights: Iterable[tuple[str, torch.Tensor]], *, copy: bool) -> None:
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
            if tensor.data_ptr() != place.target.data_ptr() or tensor.device != place.target.device:
                if not copy:
                    raise WeightUpdateError(
                        f"tensor {name!r} is not the memory this engine shares with the trainer; change the shared "
                        "weights in place and call update_weights(None, version)."
                    )
                place.target.copy_(tensor)
            missing -= place.pieces
        if missing:
            names = sorted(missing)
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            raise WeightUpdateError(f"no tensor was given for {', '.join(names[:_MAX_NAMED])}{more}.")


def _places(model: nn.Module) -> Iterator[tuple[str, _Place]]:
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Tied parameters are one piece under two names: either completes it, both are accepted.
        own = first_name.setdefault(id(parameter), name)
        experts = dict(_expert_slices(name, parameter.data))
        yield name, _Place(parameter.data, frozenset(experts) or frozenset([own]))
        for expert_name, part in experts.items():
            yield expert_name, _Place(part, frozenset([expert_name]))


def _expert_slices(name: str, stacked: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint names of the experts inside a stacked (experts, out, in) parameter; nothing for other parameters."""
    stem, _, leaf = name.rpartition(".")
    if not stem.endswith(".experts") or stacked.ndim != 3:
        return
    for expert in range(stacked.shape[0]):
        if leaf == "gate_up_proj":
            half = stacked.shape[1] // 2
            yield f"{stem}.{expert}.gate_proj.weight", stacked[expert, :half]
            yield f"{stem}.{expert}.up_proj.weight", stacked[expert, half:]
        elif leaf == "down_proj":
            yield f"{stem}.{expert}.down_proj.weight", stacked[expert]
