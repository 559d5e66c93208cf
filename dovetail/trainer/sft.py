"""`trainer.method=sft`: conversations, made into a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from dovetail.agents.chat import ChatRenderer
from dovetail.algorithms.offline.registry import OfflineLoss
from dovetail.algorithms.offline.sft import sft_loss
from dovetail.config.root import DovetailConfig
from dovetail.data.build import example_loader
from dovetail.data.conversations import ConversationDataset
from dovetail.observability.tracker import Tracker
from dovetail.trainer.base import total_training_steps
from dovetail.trainer.method import Method, RunOptions
from dovetail.trainer.model_folders import load_readers
from dovetail.trainer.offline import OfflineGroups, OfflineTrainer, create_offline_groups
from dovetail.trainer.stopping import StopRequest
from dovetail.workers.offline import OfflineWorker


class SFTWorker(OfflineWorker):
    """A policy that learns to write what the assistant wrote."""

    def _build_loss(self) -> OfflineLoss:
        return sft_loss()


class SFTMethod(Method):
    """Reads all conversations; a row that cannot be used is named here."""

    def __init__(self, config: DovetailConfig, options: RunOptions, open_things: ExitStack) -> None:
        self._config, self._options = config, options
        data = config.data
        tokenizer, _ = load_readers(config)
        renderer = ChatRenderer(tokenizer, **data.apply_chat_template_kwargs) if tokenizer.chat_template else None

        def read(files: tuple[str, ...], max_samples: int) -> ConversationDataset:
            return ConversationDataset(
                files, tokenizer, renderer, data, config.sft, max_samples=max_samples, seed=config.data_seed
            )

        self._val_loader = None
        if data.val_paths:
            held_out = read(data.val_paths, data.val_max_samples)
            self._val_loader = example_loader(config, held_out, is_training=False)
        if data.train_paths:
            train = read(data.train_paths, data.train_max_samples)
            self._train_loader = example_loader(config, train, is_training=True)
        else:  # a run that only validates draws none
            assert self._val_loader is not None, "the checks ask for one of the two"
            self._train_loader = self._val_loader
        open_things.callback(self._train_loader.close)
        self.total_steps = total_training_steps(config, len(self._train_loader))

    def create_groups(self, *, use_gpu: bool) -> OfflineGroups:
        return create_offline_groups(self._config, SFTWorker, use_ray=self._options.use_ray, use_gpu=use_gpu)

    def create_trainer(
        self,
        tracker: Tracker,
        create_groups: Callable[[], OfflineGroups],
        *,
        on_phase: Callable[[str | None], None],
        stop: StopRequest,
    ) -> OfflineTrainer:
        return OfflineTrainer(
            self._config,
            train_loader=self._train_loader,
            val_loader=self._val_loader,
            tracker=tracker,
            create_groups=create_groups,
            on_phase=on_phase,
            stop=stop,
        )
