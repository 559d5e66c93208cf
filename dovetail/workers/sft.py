"""`SFTWorker`: a policy that learns to write what the assistant wrote, and shows how far it is."""

from __future__ import annotations

from dovetail.algorithms.offline.registry import OfflineLoss
from dovetail.algorithms.offline.sft import sft_loss
from dovetail.backends.base import TrainBackend
from dovetail.controller import Dispatch, register
from dovetail.protocol import DataProto
from dovetail.workers.hybrid_engine import HybridEngine
from dovetail.workers.offline import OfflineWorker


class SFTWorker(OfflineWorker):
    """Has an engine where `sft.val_samples` asks for one."""

    _hybrid: HybridEngine | None = None

    @register(dispatch_mode=Dispatch.mesh("rollout", pad=True))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """The most likely response to each prompt, by the current weights."""
        assert self._hybrid is not None, "only asked where the configuration has samples"
        self._hybrid.weights_changed()
        return self._hybrid.generate(prompts)

    def close(self) -> None:
        if self._hybrid is not None:
            self._hybrid.close()

    def _build_loss(self) -> OfflineLoss:
        return sft_loss()

    def _init_engine(self, backend: TrainBackend) -> None:
        if self.config.num_val_samples:
            self._hybrid = HybridEngine(self.config, backend, device=self.device, rank=self.rank)
            size = self._hybrid.engine_size
            self._register_dispatch_collect_info("rollout", self.rank // size, self.rank % size == 0)
