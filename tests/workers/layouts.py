"""Ways to lay one update out over processes and micro-batches, and the comparison of what they give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import pytest

from dovetail.config.actor import Strategy
from dovetail.protocol import DataProto
from tests.backends.tiny import largest_difference
from tests.ranks import run_alone, run_ranks
from tests.workers.tiny_run import TOLERANCE, Updated

PADDED = {"use_remove_padding": False}

BySetting = dict[str, Updated]
T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """A way to do the same update. `micro_batch` counts rows, `tokens` turns dynamic micro-batches on.

    `losses`: with every policy loss, too. `like` is the layout it is compared with.
    """

    world_size: int
    strategy: Strategy = "fsdp2"
    micro_batch: int = 4
    tokens: int | None = None
    sp_size: int = 1
    fsdp: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    losses: bool = False
    like: str = "reference"

    def keys(self, role: str, model: str) -> dict[str, Any]:
        """The configuration of the section `role`, whose model is in the section `model`."""
        return {
            f"{role}.ppo_micro_batch_size_per_gpu": self.micro_batch,
            f"{role}.use_dynamic_bsz": self.tokens is not None,
            f"{role}.ppo_max_token_len_per_gpu": self.tokens or 1,
            f"{role}.fsdp_config": self.fsdp,
            **{f"{model}.{key}": value for key, value in self.model.items()},
        }


class WorldSize(Protocol):
    @property
    def world_size(self) -> int: ...


class OnDemand(Generic[T]):
    """By layout, what each rank found. The layouts of a world size share one start of its processes, when first asked.

    `run(rank, world_size, *args)` gives what it found by layout, for those of its world size.
    """

    def __init__(self, layouts: Mapping[str, WorldSize], run: Callable[..., dict[str, T]], *args: Any) -> None:
        self._layouts, self._run, self._args = layouts, run, args
        self._by_size: dict[int, list[dict[str, T]]] = {}

    def __getitem__(self, name: str) -> list[T]:
        size = self._layouts[name].world_size
        if size not in self._by_size:
            if size == 1:
                self._by_size[size] = [run_alone(self._run, *self._args, timeout=600.0)]
            else:
                self._by_size[size] = run_ranks(self._run, size, *self._args, timeout=600.0)
        return [found[name] for found in self._by_size[size]]


ByLayout = OnDemand[BySetting]
"""Layout, then rank, then setting."""


def slow_on_four(layouts: Mapping[str, WorldSize], names: Iterable[str]) -> list[Any]:
    """Parameters of a test: layouts on more than two processes are for `make test-all`."""
    return [pytest.param(n, marks=pytest.mark.slow) if layouts[n].world_size > 2 else n for n in names]


def train_layouts(
    layouts: Mapping[str, Layout],
    train: Callable[[Path, Layout, DataProto], BySetting],
    prepare: Callable[[int, int, Path], tuple[Path, DataProto]],
    folder: Path,
) -> ByLayout:
    """`prepare` makes the model and the batch, in a process of its own, too."""
    return OnDemand(layouts, _train_all, layouts, train, *run_alone(prepare, folder))


def assert_same_updates(ranks: list[BySetting], reference: BySetting) -> None:
    for rank, found in enumerate(ranks):
        for setting, updated in found.items():
            expected = reference[setting]
            assert updated.metrics == pytest.approx(expected.metrics, abs=TOLERANCE, rel=TOLERANCE), (setting, rank)
            assert largest_difference(updated.weights, expected.weights) < TOLERANCE, (setting, rank)


def _train_all(
    rank: int,
    world_size: int,
    layouts: Mapping[str, Layout],
    train: Callable[[Path, Layout, DataProto], BySetting],
    folder: Path,
    batch: DataProto,
) -> dict[str, BySetting]:
    chosen = {name: layout for name, layout in layouts.items() if layout.world_size == world_size}
    return {name: train(folder, layout, batch) for name, layout in chosen.items()}
