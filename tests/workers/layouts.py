"""Ways to lay one update out over processes and micro-batches, and the comparison of what they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.actor import Strategy
from dovetail.protocol import DataProto
from tests.ranks import run_alone, run_ranks
from tests.workers.tiny_run import TOLERANCE, Updated, largest_difference

PADDED = {"use_remove_padding": False}

BySetting = dict[str, Updated]
ByLayout = dict[str, list[BySetting]]
"""Layout, then rank, then setting."""


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


def train_layouts(
    layouts: Mapping[str, Layout],
    train: Callable[[Path, Layout, DataProto], BySetting],
    prepare: Callable[[int, int, Path], tuple[Path, DataProto]],
    folder: Path,
) -> ByLayout:
    """By layout, what each rank found. All layouts of a world size share one start of its processes.

    `prepare` makes the model and the batch, in a process of its own, too.
    """
    model, batch = run_alone(prepare, folder)
    by_size = {1: [run_alone(_train_all, layouts, train, model, batch)]}
    for size in (2, 4):
        by_size[size] = run_ranks(_train_all, size, layouts, train, model, batch, timeout=600.0)
    return {name: [found[name] for found in by_size[layout.world_size]] for name, layout in layouts.items()}


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
