"""`global_profiler.*`: traces of chosen steps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.base import Section


class ProfilerConfig(Section):
    """`torch.profiler` around whole training steps, in the trainer's processes."""

    tool: Literal["torch", "nsys", "npu", "torch_memory", "precision_debugger"] | None = Field(
        "torch", description="torch writes a trace for Perfetto; with the others, or null, nothing is profiled."
    )
    steps: list[int] | None = Field(None, description="Training steps that are profiled, e.g. [3]. Null: none.")
    save_path: str | None = Field(None, description="Folder of the traces. Null: `profile` in the run folder.")
    ranks: list[int] = Field([0], description="Processes that write a trace.")
    all_ranks: bool = Field(False, description="Every process writes one.")

    @property
    def chosen_steps(self) -> frozenset[int]:
        """The steps that are profiled."""
        return frozenset(self.steps or ()) if self.tool == "torch" else frozenset()

    def profiles(self, rank: int) -> bool:
        """Whether this process writes a trace."""
        return self.all_ranks or rank in self.ranks
