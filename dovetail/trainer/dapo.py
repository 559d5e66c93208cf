"""`RayDAPOTrainer`: PPO's loop with dynamic sampling (https://arxiv.org/abs/2503.14476).

Groups whose responses all have the same score carry no signal. More prompts are generated to replace them; groups
beyond what the batch needs are carried over to the next step. When the limit of generation rounds is reached, the batch
is filled up with groups without signal: a step with less signal is better than a crashed run.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import torch

from dovetail.protocol import DataProto
from dovetail.protocol.trajectories import one_row_each
from dovetail.rewards.columns import with_scores
from dovetail.rewards.runner import RewardResult
from dovetail.trainer.base import Metrics
from dovetail.trainer.group_rows import split_groups, within_bound
from dovetail.trainer.ppo import RayPPOTrainer
from dovetail.trainer.recording import Rollout
from dovetail.trainer.stalled import EMPTY_ROUNDS, no_signal

logger = logging.getLogger(__name__)

SURPLUS = "surplus"
"""File of a checkpoint: groups beyond what the last batch needed."""

_SCORE_NAMES = (None, "score", "seq_reward", "seq_final_reward", "reward")


class RayDAPOTrainer(RayPPOTrainer):
    """Used when `algorithm.filter_groups.enable` is on; otherwise it is the PPO loop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._surplus: DataProto | None = None
        self._num_carried = 0
        self._rounds: list[Metrics] = []

    def collect(self) -> Rollout:
        if not self.config.algorithm.filter_groups.enable:
            return super().collect()
        with_signal, without = self._fill_batch(self.config.data.train_batch_size)
        return self._as_rollout(with_signal, without)

    def _fill_batch(self, wanted: int) -> tuple[list[DataProto], list[DataProto]]:
        """Groups with signal, at least `wanted` of them unless the limit of rounds is reached, and the others."""
        limit = self.config.algorithm.filter_groups.max_num_gen_batches
        with_signal = self._trainable_surplus()
        self._num_carried = len(with_signal)
        self._surplus = None
        self._rounds = []
        without: list[DataProto] = []
        empty_rounds = 0
        while len(with_signal) < wanted and (limit == 0 or len(self._rounds) < limit):
            before = len(with_signal)
            scored = self._scored_batch()
            if len(self._rounds) == 1:
                with_signal = [_with_dtypes_of(scored, group) for group in with_signal]
            for group in split_groups(scored):
                (with_signal if self._has_signal(group) else without).append(group)
            empty_rounds = empty_rounds + 1 if len(with_signal) == before else 0
            if limit == 0 and empty_rounds == EMPTY_ROUNDS:
                metric = self.config.algorithm.filter_groups.metric
                raise no_signal(self.global_step, empty_rounds, len(without), metric)
        if len(with_signal) < wanted:
            logger.warning(
                "step %d: %d of %d groups have signal after %d generation rounds "
                "(algorithm.filter_groups.max_num_gen_batches=%d); the rest is filled with groups without signal",
                self.global_step, len(with_signal), wanted, len(self._rounds), limit,
            )  # fmt: skip
        return with_signal, without

    def _trainable_surplus(self) -> list[DataProto]:
        """Without groups that are too old: generated ahead for steps that the surplus was enough for, or loaded with a
        lower bound than they were generated under. The stream's ledger drops what is neither trained nor carried on."""
        if self._surplus is None:
            return []
        oldest = self.global_step - 1 - self.config.group_staleness_bound
        masks_stale = self.config.async_training.on_stale_in_force == "mask"
        return within_bound(split_groups(self._surplus), oldest, masks_stale=masks_stale)

    def _scored_batch(self) -> DataProto:
        """One generation round with its scores as columns, because filtering needs them at once."""
        batch = self._next_responses()
        rewards = self._finish_rewards(self._start_rewards(batch, started=self._started_scores(batch)))
        self._rounds.append(rewards.metrics)
        return with_scores(batch, rewards.columns)

    def _as_rollout(self, with_signal: list[DataProto], without: list[DataProto]) -> Rollout:
        wanted = self.config.data.train_batch_size
        used = with_signal[:wanted]
        filled = without[: wanted - len(used)]
        surplus = with_signal[wanted:]
        self._surplus = _joined(surplus) if surplus else None
        batch = _joined([*used, *filled])
        metrics: Metrics = {
            "train/num_gen_batches": float(len(self._rounds)),
            "train/groups_with_signal": float(len(used)),
            "train/groups_without_signal": float(len(without)),
            "train/groups_carried_in": float(self._num_carried),
            "train/groups_carried_over": float(len(surplus)),
        }
        batch, order = self._arranged(batch, metrics)
        scores = [name for name in batch.tensors if name in ("token_level_scores", "reward_failed")]
        columns = batch.select(batch_keys=scores, non_tensor_batch_keys=[])
        columns.meta_info = {}
        return Rollout(batch, order, RewardResult(columns, _over_rounds(self._rounds), {}), metrics)

    def _has_signal(self, group: DataProto) -> bool:
        """Whether the answers that could be scored differ in the chosen metric."""
        group = one_row_each(group)
        metric = self.config.algorithm.filter_groups.metric
        if metric in _SCORE_NAMES:
            values = group.tensors["token_level_scores"].sum(dim=1)
        elif metric in group.non_tensor_batch:
            values = torch.tensor([float(value) for value in group.non_tensor_batch[metric]])
        else:
            raise ValueError(
                f"algorithm.filter_groups.metric={metric} is not a number that the reward returns; it returns "
                f"{', '.join(sorted(group.non_tensor_batch))}. Use score, or return {metric} from the reward function."
            )
        scored = values[~group.tensors["reward_failed"].bool() & ~values.isnan()]
        return len(scored) > 1 and bool((scored != scored[0]).any())

    def _driver_state(self) -> dict[str, Any]:
        return {**super()._driver_state(), "surplus": self._surplus is not None}

    def _carried_over(self) -> dict[str, DataProto]:
        return {} if self._surplus is None else {SURPLUS: self._surplus}

    def _load_driver_state(self, state: dict[str, Any]) -> None:
        super()._load_driver_state(state)
        self._surplus = self.checkpoints.carried[SURPLUS] if state.get("surplus") else None
        if self.stream is not None and self._surplus is not None:
            self.stream.load_taken(split_groups(self._surplus))


def _with_dtypes_of(scored: DataProto, group: DataProto) -> DataProto:
    """A carried-over group that goes into one batch with `scored`. Older checkpoints hold int64 in narrow columns."""
    tensors = {name: column.to(scored.tensors[name].dtype) for name, column in group.tensors.items()}
    return DataProto.from_dict(tensors, group.non_tensor_batch, group.meta_info)


def _joined(groups: list[DataProto]) -> DataProto:
    """Groups of several rounds. A reward need not return the same columns in each, as for data of another source."""
    is_number: dict[str, bool] = {}
    for group in groups:
        for name, column in group.non_tensor_batch.items():
            is_number[name] = is_number.get(name, True) and column.dtype.kind == "f"
    for group in groups:
        for name in is_number.keys() - group.non_tensor_batch.keys():
            nothing, dtype = (math.nan, np.float64) if is_number[name] else (None, object)
            group.non_tensor_batch[name] = np.full(len(group), nothing, dtype=dtype)
    return DataProto.concat(groups)


def _over_rounds(rounds: list[Metrics]) -> Metrics:
    """Failures of all rounds together, means of everything else; nothing for a step that needed no generation."""
    names = dict.fromkeys(name for metrics in rounds for name in metrics)
    values = {name: [metrics[name] for metrics in rounds if name in metrics] for name in names}
    return {name: sum(numbers) / (1 if name == "reward/failed" else len(numbers)) for name, numbers in values.items()}
