"""Dovetail: reinforcement-learning post-training for language models. Imports nothing heavy by itself."""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.api import DAPO, DPO, GRPO, PPO, RLOO, SFT, Distill, RewardModel, Run

__all__ = ["DAPO", "DPO", "GRPO", "PPO", "RLOO", "SFT", "Distill", "RewardModel", "Run"]
__version__ = "0.1.0"

# Ask PyTorch to back large CPU tensors with huge pages: a batch column of 128 MiB is otherwise paid for in 32,768 page
# faults, which cost more than the arithmetic on it. PyTorch reads this once, at its first allocation; the user's own
# setting wins.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def __getattr__(name: str) -> Any:
    """The names of `dovetail.api`, imported at their first use."""
    if name in __all__:
        return getattr(importlib.import_module("dovetail.api"), name)
    raise AttributeError(f"dovetail has no {name!r}; from Python there are {', '.join(__all__)}.")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
