"""What the methods that train on a data set share: examples, loaders, one group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

from dovetail.config.root import DovetailConfig
from dovetail.data.build import PromptLoader, example_loader
from dovetail.trainer.examples import read_examples
from dovetail.trainer.method import Method, RunOptions
from dovetail.trainer.model_folders import try_readers
from dovetail.trainer.offline import OfflineGroups, OfflineTrainer, create_offline_groups
from dovetail.trainer.refusals import Refusals
from dovetail.workers.offline import OfflineWorker


class OfflineMethod(Method):
    """Reads all rows; one that cannot be used is named here. A subclass says who trains them."""

    worker: ClassVar[type[OfflineWorker]]
    trainer: ClassVar[type[OfflineTrainer]] = OfflineTrainer
    rows_per_example: ClassVar[int] = 1
    folder: ClassVar[str] = "actor"
    """Of the trained model in a checkpoint; timings call its update `update_<folder>`."""

    def __init__(self, config: DovetailConfig, options: RunOptions, open_things: ExitStack) -> None:
        super().__init__(config, options, open_things)
        data = config.data

        def load(files: tuple[str, ...], max_samples: int, *, is_training: bool) -> PromptLoader | None:
            if not files:
                return None
            dataset = read_examples(config, readers, files, max_samples=max_samples)
            return example_loader(config, dataset, is_training=is_training)

        train = val = None
        with Refusals() as refused:
            readers = try_readers(config, refused)
            self._tokenizer = readers[0]
            with refused.part():
                val = load(data.val_paths, data.val_max_samples, is_training=False)
            with refused.part():
                train = load(data.train_paths, data.train_max_samples, is_training=True)
        self._use_loaders(train, val)

    def create_groups(self, *, use_gpu: bool) -> OfflineGroups:
        return create_offline_groups(
            self._config, self.worker, use_ray=self._options.use_ray, use_gpu=use_gpu, folder=self.folder
        )

    def _trainer(self) -> Callable[..., OfflineTrainer]:
        return partial(self.trainer, rows_per_example=self.rows_per_example, phase=f"update_{self.folder}")
