"""What dispatch needs to know about a group: its number of ranks, and which rank gets which share of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class MeshLayout:
    """``dp_ranks[rank]`` is the data-parallel rank; ``collect_ranks[dp_rank]`` the rank whose result counts."""

    dp_ranks: tuple[int, ...]
    collect_ranks: tuple[int, ...]

    @classmethod
    def of_answers(cls, role: str, mesh_name: str, answers: Sequence[tuple[int, bool]]) -> MeshLayout:
        """From each rank's data-parallel rank and whether its result counts."""
        dp_ranks = tuple(dp_rank for dp_rank, _ in answers)
        collectors: dict[int, list[int]] = {dp_rank: [] for dp_rank in range(max(dp_ranks) + 1)}
        for rank, (dp_rank, is_collect) in enumerate(answers):
            if is_collect:
                collectors[dp_rank].append(rank)
        wrong = {dp_rank: ranks for dp_rank, ranks in collectors.items() if len(ranks) != 1}
        if wrong or set(dp_ranks) != set(collectors):
            raise ValueError(
                f"mesh {mesh_name!r} of {role}: every data-parallel rank 0..{max(dp_ranks)} needs exactly one "
                f"collecting rank, but rank -> dp rank is {dict(enumerate(dp_ranks))} and dp rank -> collecting ranks "
                f"is {wrong or collectors}; check the is_collect given to _register_dispatch_collect_info."
            )
        return cls(dp_ranks, tuple(ranks[0] for ranks in collectors.values()))


class Ranks(Protocol):
    """A group of workers as dispatch and collect functions see it. `WorkerGroup` is one."""

    role: str
    world_size: int
    takes_slices: bool

    def mesh_layout(self, mesh_name: str) -> MeshLayout: ...
