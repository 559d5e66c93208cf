"""`trainer.method=dpo` and `trainer.method=reward`: preferences, made into a run."""

from __future__ import annotations

from dovetail.algorithms.offline.registry import REF_LOG_PROB
from dovetail.data.preferences import PreferenceDataset
from dovetail.protocol import DataProto
from dovetail.trainer.offline import OfflineGroups, OfflineTrainer
from dovetail.trainer.offline_method import OfflineMethod
from dovetail.trainer.reference import ReferenceLogProbs
from dovetail.workers.preferences import PreferenceWorker, RewardTrainingWorker, policy_loss


class PreferenceTrainer(OfflineTrainer):
    """Adds the reference's log-probs, where the loss reads them, to every batch."""

    def _init_models(self, groups: OfflineGroups) -> None:
        super()._init_models(groups)
        self._reference: ReferenceLogProbs | None = None
        if not policy_loss(self.config).needs_reference:
            return
        # Before a checkpoint is loaded: the weights are those that the run began with.
        datasets: dict[str, PreferenceDataset] = {}
        for name, loader in (("train", self.train_loader), ("val", self.val_loader)):
            if loader is not None and isinstance(loader.dataset, PreferenceDataset):
                datasets[name] = loader.dataset
        self._reference = ReferenceLogProbs(self.tracker.folder.path, datasets)
        with self.timers("reference"):
            self._reference.prepare(
                lambda batch: groups.group.compute_log_prob_sums(batch).tensors[REF_LOG_PROB],
                resumes=self.checkpoints.resumes,
            )

    def _prepared(self, batch: DataProto, name: str) -> DataProto:
        return batch if self._reference is None else self._reference.add_to(batch, name)

    def _trained_rows(self, batch: DataProto) -> DataProto:
        # Of a loss with a baseline, the second row of an example is only read for that.
        return batch if policy_loss(self.config).baseline is None else batch.select_idxs(list(range(0, len(batch), 2)))


class DPOMethod(OfflineMethod):
    """Preferences for a policy."""

    worker, trainer = PreferenceWorker, PreferenceTrainer
    rows_per_example = 2


class RewardMethod(DPOMethod):
    """Preferences for a reward model."""

    worker, trainer = RewardTrainingWorker, OfflineTrainer
    folder = "critic"
