"""`trainer.method=distill`: on-policy distillation. The PPO loop with a teacher where the reference is.

The teacher's log-probs of the student's tokens become advantages (`distill.kl=sampled`), or the update has a loss from
what the teacher says (`workers/teacher_loss.py`). The advantages of a task reward are added with `reward_coef`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from dovetail.algorithms.distillation import clamp_signal, distillation_advantages
from dovetail.config import ConfigError
from dovetail.config.errors import Problem
from dovetail.config.methods import DistillConfig
from dovetail.config.root import DovetailConfig
from dovetail.config.wording import name_some
from dovetail.controller import WorkerGroup
from dovetail.data.prompts import PromptDataset
from dovetail.models.load import load_tokenizer
from dovetail.protocol import DataProto
from dovetail.protocol.schema import stage_columns
from dovetail.rewards.runner import PendingRewards, RewardResult
from dovetail.trainer.base import Metrics
from dovetail.trainer.method import RunOptions
from dovetail.trainer.ppo import RayPPOTrainer
from dovetail.trainer.rl import RLMethod

logger = logging.getLogger(__name__)


class DistillTrainer(RayPPOTrainer):
    """Needs `groups.ref` to be the teacher. Without `distill.reward_coef` training responses are not scored."""

    def _start_rewards(
        self, batch: DataProto, *, shaped: bool = True, started: list[Future[Any]] | None = None
    ) -> PendingRewards | RewardResult:
        if self.config.scores_training or not shaped:  # validation is scored in any case
            return super()._start_rewards(batch, shaped=shaped, started=started)
        columns = {
            "token_level_scores": torch.zeros(batch.tensors["responses"].shape),
            "reward_failed": torch.zeros(len(batch), dtype=torch.bool),
        }
        return RewardResult(DataProto.from_dict(columns), metrics={}, failures={})

    def _score_by_reference(self, ref: WorkerGroup, batch: DataProto) -> DataProto:
        """Each row by the teacher that it names, one teacher after the other."""
        settings = self.config.distill
        if not settings.teachers:
            return super()._score_by_reference(ref, batch)
        if settings.teacher_key not in batch.non_tensor_batch:  # of a user's dataset class
            why = f"the rows have no column {settings.teacher_key!r} (distill.teacher_key), only"
            raise ValueError(f"{why} {name_some(sorted(batch.non_tensor_batch))}; name the column of the teachers.")
        places = rows_by_teacher(batch.non_tensor_batch[settings.teacher_key], settings)
        columns, parts = stage_columns(batch, "compute_ref_log_prob"), []
        for name, rows in places.items():
            own = columns.select_idxs(rows)
            own = DataProto.from_dict(own.tensors, own.non_tensor_batch, {**own.meta_info, "teacher": name})
            parts.append(self._call(ref.compute_ref_log_prob, own))
        return DataProto.concat(parts).select_idxs(np.argsort(np.concatenate(list(places.values()))))

    def _add_advantages(self, batch: DataProto, metrics: Metrics) -> DataProto:
        settings = self.config.distill
        batch = super()._add_advantages(batch, metrics)
        columns = batch.tensors
        advantages = settings.reward_coef * columns["advantages"]
        if settings.kl == "sampled":
            mask = columns["response_mask"]
            signal = distillation_advantages(columns["old_log_probs"], columns["ref_log_prob"], mask)
            # The mean over tokens of the student estimates the reverse KL per token.
            metrics["distill/kl"] = float(-signal.sum() / mask.sum().clamp(min=1))
            if settings.teachers:
                for name, rows in rows_by_teacher(batch.non_tensor_batch[settings.teacher_key], settings).items():
                    metrics[f"distill/kl/{name}"] = float(-signal[rows].sum() / mask[rows].sum().clamp(min=1))
            advantages = advantages + settings.kl_coef * clamp_signal(signal, settings.loss_max_clamp)
        return DataProto.from_dict({**columns, "advantages": advantages}, batch.non_tensor_batch, batch.meta_info)


class DistillMethod(RLMethod):
    """Prompts and a teacher; rewards for validation, and for training where they are asked for."""

    def __init__(self, config: DovetailConfig, options: RunOptions, open_things: ExitStack) -> None:
        super().__init__(config, options, open_things)
        own = self._tokenizer.get_vocab()
        for path in config.distill.teacher_paths.values():
            theirs = load_tokenizer(path, trust_remote_code=config.distill.teacher.trust_remote_code)
            refuse_other_vocabulary(own, theirs.get_vocab(), config, path)
        dataset = self._train_loader.dataset
        # A class of the user's makes rows of its own, and a run that only validates asks no teacher.
        if config.distill.teachers and type(dataset) is PromptDataset and not config.trainer.val_only:
            refuse_unrouted_rows(dataset, config.distill)

    @property
    def _trainer_class(self) -> type[RayPPOTrainer]:
        return DistillTrainer


def rows_by_teacher(names: Iterable[object], settings: DistillConfig) -> dict[str, np.ndarray]:
    """The numbers of the rows of each teacher that has any."""
    called = np.array([str(name) for name in names])
    if unknown := set(called) - set(settings.teachers):
        raise ValueError(_no_teacher(settings, unknown))
    return {name: rows for name in settings.teachers if len(rows := np.flatnonzero(called == name))}


def refuse_unrouted_rows(dataset: PromptDataset, settings: DistillConfig) -> None:
    """Before anything is started, and not at the first batch with such a row."""
    key = settings.teacher_key
    names = dataset.values_of(key)
    if names is None:
        why = f"distill.teacher_key={key} names no column that all files of data.train_files have; give one that has."
        raise ConfigError([Problem("distill.teacher_key", why)])
    if unknown := set(names) - set(settings.teachers):
        raise ConfigError([Problem("distill.teachers", _no_teacher(settings, unknown))])
    if idle := set(settings.teachers) - set(names):
        logger.warning("no row of data.train_files has %s=%s: these teachers are loaded and never asked", key,
                       ", ".join(sorted(idle)))  # fmt: skip


def _no_teacher(settings: DistillConfig, unknown: Iterable[str]) -> str:
    return (
        f"rows have {settings.teacher_key}={name_some(sorted(unknown))}, and distill.teachers has only "
        f"{name_some(sorted(settings.teachers))}; add a teacher for each, or take these rows out of data.train_files."
    )


def refuse_other_vocabulary(
    own: Mapping[str, int], theirs: Mapping[str, int], config: DovetailConfig, teacher: str
) -> None:
    """Token ids must mean the same to both: the teacher reads the student's tokens, not its text."""
    different = sorted(own.items() ^ theirs.items(), key=lambda entry: entry[1])
    if not different:
        return
    token = different[0][0]
    policy = config.actor_rollout_ref.model.path
    why = (
        f"the teacher {teacher} and actor_rollout_ref.model.path={policy} have different "
        f"tokenizers: token {token!r} has {_number(theirs, token)} in the teacher's and {_number(own, token)} in the "
        f"student's ({len(different)} entries differ). The teacher scores token ids of the student; use two models of "
        "one family."
    )
    raise ConfigError([Problem("distill.teachers" if config.distill.teachers else "distill.teacher.path", why)])


def _number(vocabulary: Mapping[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "no id"
