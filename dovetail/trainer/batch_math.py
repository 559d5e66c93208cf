"""The driver's own arithmetic on a batch: KL in the reward, rollout correction, advantages. Columns in, columns out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from dovetail.algorithms import (
    FixedKLController,
    apply_kl_penalty,
    compute_offpolicy_metrics,
    compute_probs_diff_metrics,
    compute_rollout_correction_and_rejection_mask,
    get_adv_estimator_fn,
)
from dovetail.algorithms.aggregate import trajectory_row_weights
from dovetail.algorithms.masked import moved_to_kept
from dovetail.algorithms.pf_ppo import draw_pf_ppo_rows
from dovetail.config.algorithm import AlgorithmConfig
from dovetail.config.signatures import named_arguments
from dovetail.config.view import ConfigView
from dovetail.protocol import DataProto
from dovetail.protocol.trajectories import one_row_each, trajectories_of, turn_numbers
from dovetail.rewards.errors import RewardError
from dovetail.workers.mini_batches import MINI_BATCH_ROWS
from dovetail.workers.shares import LOSS_WEIGHT

Metrics = dict[str, float]

# These judge a row by itself; all others, also those a user registers, by the other answers to its prompt.
_WITHOUT_GROUPS = frozenset({"gae", "reinforce_plus_plus", "remax"})


def add_rewards(batch: DataProto, algorithm: AlgorithmConfig, kl_ctrl: FixedKLController) -> tuple[DataProto, Metrics]:
    """`token_level_rewards`: the scores, discounted by turn, less the KL to the reference when it is part of the
    reward."""
    scores = batch.tensors["token_level_scores"]
    if algorithm.turn_discount != 1.0:
        # The return of a trajectory is that of its first turn; what follows is worth less there by a power.
        scores = scores * algorithm.turn_discount ** turn_numbers(batch)
    if not algorithm.use_kl_in_reward:
        return _with(batch, token_level_rewards=scores.clone()), {}
    seen = _with(batch, token_level_scores=scores)
    trajectories = trajectories_of(batch)
    if trajectories is not None:  # the KL that is reported and controlled is a mean over trajectories
        seen = trajectories.join(seen)
    columns = seen.tensors
    rewards, metrics = apply_kl_penalty(
        columns["token_level_scores"],
        columns["old_log_probs"],
        columns["ref_log_prob"],
        columns["response_mask"],
        kl_ctrl,
        algorithm.kl_penalty,
    )
    if trajectories is not None:
        rewards = trajectories.split(rewards)
    return _with(batch, token_level_rewards=rewards), metrics


def correct_rollout(batch: DataProto, algorithm: AlgorithmConfig) -> tuple[DataProto, Metrics]:
    """Importance weights and rejection for the mismatch between engine and trainer log-probs, and its metrics.

    Without the engine's log-probs, or without a token that is trained on (all answers failed or cut off), there is
    nothing to do; without a correction only the metrics are made. In bypass mode the mismatch is not known
    here: the update corrects and reports it.
    """
    columns = batch.tensors
    settings = algorithm.rollout_correction
    if "rollout_log_probs" not in columns or "old_log_probs" not in columns or settings.bypass_mode:
        return batch, {}
    if not columns["response_mask"].any():
        return batch, {}
    pair = columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"]
    mismatch = compute_probs_diff_metrics(*pair) | ({} if settings.active else compute_offpolicy_metrics(*pair))
    metrics = {f"rollout_corr/{name}": value for name, value in mismatch.items()}
    if not settings.active:
        return batch, metrics
    correction = compute_rollout_correction_and_rejection_mask(
        columns["old_log_probs"],
        columns["rollout_log_probs"],
        columns["response_mask"],
        rollout_is=settings.rollout_is,
        rollout_is_threshold=settings.weight_threshold,
        rollout_is_batch_normalize=settings.rollout_is_batch_normalize,
        rollout_rs=settings.rollout_rs,
        rollout_rs_threshold=settings.rollout_rs_threshold,
    )
    batch = _with(batch, response_mask=correction.response_mask)
    if correction.rollout_is_weights is not None:
        batch = _with(batch, rollout_is_weights=correction.rollout_is_weights)
    return batch, metrics | correction.metrics


def add_advantages(batch: DataProto, algorithm: AlgorithmConfig, *, num_repeat: int) -> DataProto:
    """`advantages` and `returns` by the chosen estimator, which gets the columns and settings that it names.

    Rows without a score are not shown to the estimator, so that their 0 is nobody's baseline; they get 0. A trajectory
    of several rows is one row for the estimator; `loss_weight` makes it weigh as one in the loss.
    """
    trajectories = trajectories_of(batch)
    if trajectories is not None:
        joined = add_advantages(trajectories.join(batch), algorithm, num_repeat=num_repeat)
        columns = {name: trajectories.split(joined.tensors[name]) for name in ("advantages", "returns")}
        weights = trajectory_row_weights(batch.tensors["response_mask"], trajectories.number)
        return _with(batch, **columns, loss_weight=weights)
    compares = num_repeat > 1 and algorithm.adv_estimator not in _WITHOUT_GROUPS
    scored = _scored_rows(batch, compares=compares)
    seen = batch if scored.all() else batch.select_idxs(scored)
    estimate = get_adv_estimator_fn(algorithm.adv_estimator)
    advantages, returns = estimate(**named_arguments(estimate, estimator_inputs(seen, algorithm, num_repeat)))
    return _with(batch, advantages=_at_rows(advantages, scored), returns=_at_rows(returns, scored))


def filtered_rows(batch: DataProto, algorithm: AlgorithmConfig, *, seed: int) -> torch.Tensor | None:
    """The rows of PF-PPO's draw, by score; None when no row can be drawn. Rows that keep no token are not drawn."""
    scores = batch.tensors["token_level_scores"].sum(dim=1)
    drawable = batch.tensors["response_mask"].bool().any(dim=1)
    if not drawable.any():
        return None
    if trajectories_of(batch) is not None:
        raise ValueError(
            "algorithm.use_pf_ppo=True draws rows one by one, and a trajectory of this batch is several rows: the chat "
            "template rewrites its history. Use algorithm.use_pf_ppo=False."
        )
    settings = algorithm.pf_ppo
    return draw_pf_ppo_rows(
        scores, drawable, reweight_method=settings.reweight_method, weight_pow=settings.weight_pow, seed=seed
    )


def estimator_inputs(batch: DataProto, algorithm: AlgorithmConfig, num_repeat: int) -> dict[str, Any]:
    """Everything that an estimator may name: columns of the batch, settings, and what verl calls them."""
    uid = batch.non_tensor_batch["uid"]
    inputs: dict[str, Any] = {
        **batch.non_tensor_batch,
        **batch.tensors,
        # Rejection may leave out the token that the score is on; the return of the tokens before it still has it.
        "token_level_rewards": moved_to_kept(batch.tensors["token_level_rewards"], batch.tensors["response_mask"]),
        "index": uid,
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
        "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
        "gdpo_reward_weights": algorithm.gdpo_reward_weights,
        "num_repeat": num_repeat,
        "config": ConfigView(algorithm),
        "batch": batch.tensors,
        "non_tensor_batch": batch.non_tensor_batch,
    }
    if algorithm.adv_estimator == "gdpo":
        inputs["reward_components"] = _reward_components(batch, algorithm.gdpo_reward_keys)
    return inputs


def _reward_components(batch: DataProto, keys: Sequence[str]) -> torch.Tensor | None:
    """`[rows, keys]`: numbers that the reward function returned beside the score."""
    columns = batch.non_tensor_batch
    for key in keys:
        if key not in columns:
            returned = ", ".join(name for name, column in columns.items() if column.dtype.kind == "f")
            raise RewardError(
                f"algorithm.gdpo_reward_keys names {key!r}, which the reward function did not return; it returned "
                f"{returned}. Return {key!r} in its dictionary beside them, or take it out of gdpo_reward_keys."
            )
        lacking = [value for value in columns[key].tolist() if not _is_finite_number(value)]
        if lacking:
            raise RewardError(
                f"algorithm.gdpo_reward_keys names {key!r}, which is no number for {len(lacking)} of {len(batch)} "
                f"responses (first {lacking[0]!r}; nan where it returned none). Return a number for every response."
            )
    if not keys:
        return None
    return torch.stack([torch.tensor([float(value) for value in columns[key]]) for key in keys], dim=1)


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, (Real, np.bool_)) and math.isfinite(value)


def add_baselines(batch: DataProto, greedy: DataProto) -> DataProto:
    """The scores of each prompt's greedy answer, beside its sampled ones (ReMax)."""
    greedy = one_row_each(greedy)
    place = {str(uid): row for row, uid in enumerate(greedy.non_tensor_batch["uid"])}
    rows = torch.tensor([place[str(uid)] for uid in batch.non_tensor_batch["uid"]])
    columns = {
        "reward_baselines": greedy.tensors["token_level_scores"].sum(dim=1)[rows],
        "baseline_failed": greedy.tensors["reward_failed"][rows],
    }
    return batch.union(DataProto.from_dict(columns))


def with_baseline_failures(batch: DataProto) -> DataProto:
    """Rows whose greedy answer (ReMax) could not be scored have nothing to be measured against: they fail too."""
    columns = batch.tensors
    if "baseline_failed" not in columns:
        return batch
    return _with(batch, reward_failed=columns["reward_failed"].bool() | columns["baseline_failed"].bool())


def mask_failed(batch: DataProto) -> DataProto:
    """Take rows without a score out of every loss and count."""
    failed = batch.tensors["reward_failed"].bool()
    return _without_rows(batch, failed) if failed.any() else batch


def mask_truncated(batch: DataProto) -> tuple[DataProto, float]:
    """Overlong filtering: answers that were cut off teach nothing about their content. Also gives their share."""
    columns = batch.non_tensor_batch
    truncated = torch.tensor([reason == "length" for reason in columns.get("outcome", columns["finish_reason"])])
    return _without_rows(batch, truncated), float(truncated.float().mean())


def with_padding(batch: DataProto, rows: Sequence[int], mini_batch_rows: Sequence[int]) -> DataProto:
    """The rows in this order; a negative number stands for padding: the shortest row with nothing to train on."""
    index = torch.tensor(rows)
    padding = index < 0
    index[padding] = int(batch.tensors["attention_mask"].sum(dim=1).argmin())
    padded = _without_rows(batch.select_idxs(index), padding)
    if LOSS_WEIGHT in padded:
        padded = _with(padded, **{LOSS_WEIGHT: padded.tensors[LOSS_WEIGHT].masked_fill(padding, 0.0)})
    padded.meta_info = {**padded.meta_info, MINI_BATCH_ROWS: list(mini_batch_rows)}
    return padded


def _scored_rows(batch: DataProto, *, compares: bool) -> torch.Tensor:
    """Which rows have a score and, for estimators that compare answers, another scored answer to their prompt."""
    failed = batch.tensors.get("reward_failed")
    scored = torch.ones(len(batch), dtype=torch.bool) if failed is None else ~failed.bool()
    if scored.all() or not compares:
        return scored
    uids = [str(uid) for uid in batch.non_tensor_batch["uid"]]
    left = Counter(uid for uid, has_score in zip(uids, scored.tolist(), strict=True) if has_score)
    return scored & torch.tensor([left[uid] > 1 for uid in uids])


def _at_rows(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`values` at these rows of a batch, 0 at the others."""
    if rows.all():
        return values
    padded = values.new_zeros(len(rows), values.shape[1])
    padded[rows] = values
    return padded


def _without_rows(batch: DataProto, rows: torch.Tensor) -> DataProto:
    mask = batch.tensors["response_mask"].clone()
    mask[rows] = 0
    return _with(batch, response_mask=mask)


def _with(batch: DataProto, **columns: torch.Tensor) -> DataProto:
    """The batch with these columns added or replaced; the other columns are the same tensors."""
    tensors = {**batch.tensors, **columns}
    return DataProto.from_dict(tensors, batch.non_tensor_batch, batch.meta_info)
