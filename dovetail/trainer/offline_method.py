"""What the methods that train on a data set share: examples, loaders, one group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

from dovetail.agents.chat import ChatRenderer
from dovetail.config.root import DovetailConfig
from dovetail.data.build import PromptLoader, example_loader
from dovetail.data.examples import ExampleDataset
from dovetail.observability.tracker import Tracker
from dovetail.trainer.base import total_training_steps
from dovetail.trainer.method import Method, RunOptions
from dovetail.trainer.model_folders import load_readers
from dovetail.trainer.offline import OfflineGroups, OfflineTrainer, create_offline_groups
from dovetail.trainer.stopping import StopRequest
from dovetail.workers.offline import OfflineWorker


class OfflineMethod(Method):
    """Reads all rows; one that cannot be used is named here. A subclass says what an example is and who trains it."""

    worker: ClassVar[type[OfflineWorker]]
    trainer: ClassVar[type[OfflineTrainer]] = OfflineTrainer
    rows_per_example: ClassVar[int] = 1
    folder: ClassVar[str] = "actor"
    """Of the trained model in a checkpoint."""
    phase: ClassVar[str] = "update_actor"
    """Name of the update in timings."""

    def __init__(self, config: DovetailConfig, options: RunOptions, open_things: ExitStack) -> None:
        self._config, self._options = config, options
        data = config.data
        self._tokenizer, _ = load_readers(config)
        self._renderer = (
            ChatRenderer(self._tokenizer, **data.apply_chat_template_kwargs) if self._tokenizer.chat_template else None
        )

        def load(files: tuple[str, ...], max_samples: int, *, is_training: bool) -> PromptLoader:
            dataset = self._read(files, max_samples=max_samples, seed=config.data_seed)
            return example_loader(config, dataset, is_training=is_training)

        self._val_loader = load(data.val_paths, data.val_max_samples, is_training=False) if data.val_paths else None
        if data.train_paths:
            self._train_loader = load(data.train_paths, data.train_max_samples, is_training=True)
        else:  # a run that only validates draws none
            assert self._val_loader is not None, "the checks ask for one of the two"
            self._train_loader = self._val_loader
        open_things.callback(self._train_loader.close)
        self.total_steps = total_training_steps(config, len(self._train_loader))

    @abstractmethod
    def _read(self, files: tuple[str, ...], *, max_samples: int, seed: int) -> ExampleDataset[Any]:
        """The examples of these files."""

    def create_groups(self, *, use_gpu: bool) -> OfflineGroups:
        return create_offline_groups(
            self._config, self.worker, use_ray=self._options.use_ray, use_gpu=use_gpu, folder=self.folder
        )

    def create_trainer(
        self,
        tracker: Tracker,
        create_groups: Callable[[], OfflineGroups],
        *,
        on_phase: Callable[[str | None], None],
        stop: StopRequest,
    ) -> OfflineTrainer:
        return self.trainer(
            self._config,
            train_loader=self._train_loader,
            val_loader=self._val_loader,
            tracker=tracker,
            create_groups=create_groups,
            rows_per_example=self.rows_per_example,
            phase=self.phase,
            on_phase=on_phase,
            stop=stop,
        )
