"""Streams of weights from a trainer: read to the end, cast to the engine's dtype, checked against what its model needs.

A low-rank adapter travels as a stream of its own, to an engine that applies it beside its base weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor

from dovetail.config.adapter import ADAPTER_PREFIX, ADAPTER_SETTINGS, ADAPTER_WEIGHTS
from dovetail.config.wording import name_some

NamedTensors: TypeAlias = Iterable[tuple[str, Tensor]]
"""Full tensors under Hugging Face names, in any order. A tensor is valid until the next one is asked for."""

# Matrices that engines keep in float32 beside half-precision weights: routers of experts, state-space decays.
_FULL_PRECISION = re.compile(r"(?:^|[._])(?:gate|router|A_log)(?:\.weight)?$")


class GatheredWeights:
    """A stream that can be read on after a reader has given up, and knows whether it failed itself.

    Gathering is collective: a rank that stops half-way leaves the other ranks in a collective until it times out.
    """

    def __init__(self, weights: NamedTensors) -> None:
        self._weights = iter(weights)
        self.failed = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        try:
            return next(self._weights)
        except StopIteration:
            raise
        except BaseException:
            self.failed = True
            raise

    def drain(self) -> None:
        """Take what nobody has taken yet. A source that failed gives nothing more."""
        if not self.failed:
            for _ in self:
                pass


def in_engine_dtype(weights: NamedTensors, dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    """Round matrices to what the engine holds (None: not known), so that no more bytes travel than it keeps.

    Engines round the same way when they load, so they end with the same bits. What they keep in full precision, and
    vectors, which weigh nothing, travel as they are.
    """
    if dtype is None:
        yield from weights
        return
    held: torch.dtype = getattr(torch, dtype)
    for name, tensor in weights:
        if tensor.is_floating_point() and tensor.dim() > 1 and tensor.itemsize > held.itemsize:
            tensor = tensor if _FULL_PRECISION.search(name) else tensor.detach().to(held)
        yield name, tensor


@dataclass(frozen=True, slots=True)
class ExpectedWeights:
    """Names and shapes one model takes. `ties` maps a name to the one that stands for both: either is enough.

    `optional` may come and need not: buffers that a checkpoint holds and nothing trains. `stacks` maps a name in memory
    to the names on disk that it stands for, where both are taken: a mixture's experts, stacked into one tensor.
    """

    shapes: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stacks: Mapping[str, Sequence[str]] = field(default_factory=dict)


class WeightAccount:
    """Checks the tensors of one update off against what is expected."""

    def __init__(self, expected: ExpectedWeights) -> None:
        self._expected = expected
        self._missing = {expected.ties.get(name, name) for name in expected.shapes} - expected.stacks.keys()

    def problem_with(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Why this tensor cannot be taken; None counts it as arrived."""
        wanted = self._expected.shapes.get(name, self._expected.optional.get(name))
        if wanted is None:
            return f"the engine's model has no tensor {name!r} (shape {tuple(shape)})."
        if tuple(shape) != tuple(wanted):
            return f"tensor {name!r} has shape {tuple(shape)}; the engine's model has it with shape {tuple(wanted)}."
        own = self._expected.ties.get(name, name)
        self._missing.difference_update(self._expected.stacks.get(own, (own,)))
        return None

    def missing(self) -> str | None:
        """What never arrived; None when the update is complete."""
        if not self._missing:
            return None
        return f"no tensor was given for {name_some(sorted(self._missing), 8)}."


@dataclass(frozen=True)
class LoraAdapter:
    """`tensors` are named `<module>.lora_A.weight` and `<module>.lora_B.weight`, modules as in Hugging Face's model.

    A module computes `W x + alpha / rank * B A x`.
    """

    rank: int
    alpha: float
    tensors: NamedTensors


def write_peft_folder(adapter: LoraAdapter, folder: Path, *, base_model: str | None = None) -> list[str]:
    """The adapter as a folder that peft and engines read; returns the names of its tensors."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors}
    if not tensors:
        raise ValueError("the adapter has no tensors; train with lora_rank above 0, or send merged weights.")
    # Whole names: `o_proj` alone would put adapters into layers that have none.
    modules = sorted({name.split(".lora_")[0] for name in tensors})
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": modules,
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"{ADAPTER_PREFIX}{name}": tensor for name, tensor in tensors.items()}, folder / ADAPTER_WEIGHTS)
    (folder / ADAPTER_SETTINGS).write_text(json.dumps(settings, indent=1))
    return list(tensors)
