"""What one method of training (`trainer.method`) adds to a run: its inputs, its groups and its trainer."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.agents.stops import stop_notice
from dovetail.config.errors import Notice
from dovetail.config.root import DovetailConfig
from dovetail.data.build import PromptLoader
from dovetail.data.unread_tokenizer import UnreadTokenizer
from dovetail.observability.tracker import Tracker
from dovetail.trainer.base import BaseTrainer, total_training_steps
from dovetail.trainer.groups import TrainedGroups
from dovetail.trainer.recording import Recording

if TYPE_CHECKING:
    from dovetail.trainer.ppo import RayPPOTrainer

_METHODS = {
    "rl": "dovetail.trainer.rl:RLMethod",
    "sft": "dovetail.trainer.sft:SFTMethod",
    "dpo": "dovetail.trainer.preferences:DPOMethod",
    "reward": "dovetail.trainer.preferences:RewardMethod",
    "distill": "dovetail.trainer.distill:DistillMethod",
}
"""Imported when it is chosen: one method does not pay for the modules of another."""


@dataclass(frozen=True)
class RunOptions:
    """What the caller of `run_training` chose beside the configuration."""

    use_ray: bool = True
    trainer_class: type[RayPPOTrainer] | None = None
    recording: Recording | None = None


class Method(ABC):
    """Built before anything is started: errors in files, columns and functions are raised here.

    What it opens, it enters into `open_things`, which closes it when the run ends.
    """

    _tokenizer: Any
    total_steps: int
    """Steps of the run, for consoles and schedules."""

    def __init__(self, config: DovetailConfig, options: RunOptions, open_things: ExitStack) -> None:
        self._config, self._options, self._open_things = config, options, open_things

    def notices(self) -> tuple[Notice, ...]:
        """What is said once before the run starts: tokens that end a response, where the model's files disagree."""
        is_read = not isinstance(self._tokenizer, UnreadTokenizer)
        notice = stop_notice(self._config, self._tokenizer) if is_read else None
        return () if notice is None else (notice,)

    def _use_loaders(self, train: PromptLoader | None, val: PromptLoader | None) -> None:
        """`train` is None for a run that only validates: it draws none."""
        loader = val if train is None else train
        assert loader is not None, "the checks ask for one of the two"
        self._train_loader, self._val_loader = loader, val
        self._open_things.callback(loader.close)
        self.total_steps = total_training_steps(self._config, len(loader))

    def cluster_started(self, *, use_gpu: bool) -> None:
        """The cluster's nodes and devices are known. Called before `create_groups`."""
        return

    @abstractmethod
    def create_groups(self, *, use_gpu: bool) -> TrainedGroups:
        """Start the worker processes."""

    def create_trainer(self, tracker: Tracker, **run: Any) -> BaseTrainer[Any]:
        """The trainer; `run` are the other arguments of `BaseTrainer`."""
        loaders = {"train_loader": self._train_loader, "val_loader": self._val_loader}
        return self._trainer()(self._config, tracker=tracker, **loaders, **run)

    @abstractmethod
    def _trainer(self) -> Callable[..., BaseTrainer[Any]]:
        """The trainer's class, with the arguments that only it takes."""


def open_method(config: DovetailConfig, options: RunOptions, open_things: ExitStack) -> Method:
    """The method that `trainer.method` names, with its inputs read and checked."""
    module, _, name = _METHODS[config.trainer.method].partition(":")
    kind: type[Method] = getattr(importlib.import_module(module), name)
    return kind(config, options, open_things)
