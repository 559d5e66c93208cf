"""`trainer.method=sft`: conversations, made into a run."""

from __future__ import annotations

from typing import Any

from dovetail.algorithms.offline.registry import OfflineLoss
from dovetail.algorithms.offline.sft import sft_loss
from dovetail.data.conversations import ConversationDataset, Renderer
from dovetail.trainer.offline_method import OfflineMethod
from dovetail.workers.offline import OfflineWorker


class SFTWorker(OfflineWorker):
    """A policy that learns to write what the assistant wrote."""

    def _build_loss(self) -> OfflineLoss:
        return sft_loss()


class SFTMethod(OfflineMethod):
    """Conversations."""

    worker = SFTWorker

    def _read(
        self, files: tuple[str, ...], tokenizer: Any, renderer: Renderer | None, **which: int
    ) -> ConversationDataset:
        return ConversationDataset(files, tokenizer, renderer, self._config.data, self._config.sft, **which)
