"""`global_profiler.*`: traces of chosen steps."""

from __future__ import annotations

from typing import Literal

from dovetail.config.base import Section, all_of, key, unsupported, unused, when_is, when_not

_BUILT_IN = ("torch", "torch_memory")


class ProfilerConfig(Section):
    """Traces or memory histories of whole training steps, in the trainer's processes."""

    rules = (
        unused("only torch and torch_memory are built in; no profile is written", unless=_BUILT_IN, only="tool"),
        unsupported(
            "it records the memory of GPUs; use torch",
            "torch_memory",
            when=all_of(when_is("trainer.device", "cpu"), when_not("chosen_steps", frozenset())),
            only="tool",
        ),
        unused("{section}.steps names none", when_is("chosen_steps", frozenset()), only="save_path ranks all_ranks"),
    )

    tool: Literal["torch", "nsys", "npu", "torch_memory", "precision_debugger"] | None = key(
        "torch",
        "torch writes a trace for Perfetto, torch_memory what every allocation on the GPU was for "
        "(docs.pytorch.org/memory_viz); with the others, or null, nothing is profiled.",
    )
    steps: list[int] | None = key(None, "Training steps that are profiled, e.g. [3]. Null: none.")
    save_path: str | None = key(None, "Folder of the traces. Null: `profile` in the run folder.")
    ranks: list[int] = key([0], "Processes that write a trace.")
    all_ranks: bool = key(False, "Every process writes one.")

    @property
    def chosen_steps(self) -> frozenset[int]:
        """The steps that are profiled."""
        return frozenset(self.steps or ()) if self.tool in _BUILT_IN else frozenset()

    def profiles(self, rank: int) -> bool:
        """Whether this process writes a trace."""
        return self.all_ranks or rank in self.ranks
