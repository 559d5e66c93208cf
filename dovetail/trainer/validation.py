"""Answer the validation prompts and score them. Changes no model and no state of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.config.root import DovetailConfig
from dovetail.data.build import PromptLoader
from dovetail.protocol import DataProto
from dovetail.protocol.trajectories import one_row_each
from dovetail.rewards.runner import RewardResult
from dovetail.trainer.agent_records import agent_records
from dovetail.trainer.prompt_draws import with_seeds
from dovetail.trainer.val_metrics import validation_metrics

# Columns of numbers that reward functions return beside the score are validated too.
_NOT_VALUES = ("reward_failed", "token_level_scores")
_SPREAD = {"mean": np.mean, "max": np.max, "min": np.min}


@dataclass(frozen=True)
class Validation:
    """`rows` are for the run folder, `dumped` (when asked for) for `trainer.validation_data_dir` and the trackers."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    dumped: list[dict[str, Any]]


def validate(
    config: DovetailConfig,
    loader: PromptLoader,
    answer: Callable[..., DataProto],
    score: Callable[[DataProto], RewardResult],
    dump: Callable[[DataProto, list[str]], list[dict[str, Any]]] | None = None,
) -> Validation:
    """Every validation prompt once, `rollout.val_kwargs.n` answers each; a trajectory of several rows is one answer.

    Seeds depend on the prompt only, so two validations differ by the weights alone. Rows that could not be scored are
    left out and counted.
    """
    n = config.actor_rollout_ref.rollout.val_kwargs.n
    rows: list[dict[str, Any]] = []
    dumped: list[dict[str, Any]] = []
    turns: list[float] = []
    # Row numbers, not places in the order: data.validation_shuffle draws another order each time.
    numbers = loader.sampler.order_of(loader.epoch).tolist()
    for prompts in loader:
        uids = [f"val-{number}" for number in numbers[: len(prompts)]]
        del numbers[: len(prompts)]
        batch = answer(with_seeds(prompts, uids, config.trainer.seed), n=n, validate=True)
        rewards = score(batch)
        columns = {**batch.non_tensor_batch, **rewards.columns.non_tensor_batch}
        scored_batch = one_row_each(DataProto.from_dict({**batch.tensors, **rewards.columns.tensors}, columns))
        rows += scored_rows(scored_batch, rewards, config.data.reward_fn_key)
        if "num_turns" in scored_batch:
            turns += scored_batch.non_tensor_batch["num_turns"].tolist()
        if dump is not None:
            dumped += dump(scored_batch, rewards.solution_strs)
    metrics = score_metrics(rows)
    for name, values in (("num_turns", turns), ("response_length", [row["length"] for row in rows])):
        metrics |= {f"val-aux/{name}/{word}": float(f(values)) for word, f in _SPREAD.items() if values}
    # Whoever sees the accuracy fall must see that responses hit the limit, if they do.
    metrics["val-aux/response_length/clip_ratio"] = sum(row["truncated"] for row in rows) / max(len(rows), 1)
    return Validation(metrics, rows, dumped)


def score_metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of the rows that have a score, by data source, and how many have none."""
    scored = [row for row in rows if not row["failed"]]
    metrics: dict[str, float] = {"val-aux/failed": float(len(rows) - len(scored))}
    for source in dict.fromkeys(row["data_source"] for row in scored):
        metrics |= _source_metrics(source, [row for row in scored if row["data_source"] == source])
    return metrics


def _source_metrics(source: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of one data source, because the function may return other numbers for another."""
    names = [name for name in rows[0]["values"] if all(name in row["values"] for row in rows)]
    # A response without an answer has a vote, too: that there is none.
    answers = [row["pred"] for row in rows] if any(row["pred"] is not None for row in rows) else None
    values = {name: [row["values"][name] for row in rows] for name in names}
    return validation_metrics([source] * len(rows), [row["uid"] for row in rows], values, answers)


def scored_rows(batch: DataProto, rewards: RewardResult, source_key: str) -> list[dict[str, Any]]:
    """Of a batch with its scores, one row for each answer that was scored."""
    columns, others = batch.tensors, batch.non_tensor_batch
    scores = columns["token_level_scores"].sum(dim=1).tolist()
    lengths = columns["response_mask"].sum(dim=1).tolist()
    numeric = [
        name
        for name, column in rewards.columns.non_tensor_batch.items()
        if column.dtype != object and name not in (*_NOT_VALUES, "score")
    ]
    reasons = others.get("outcome", others["finish_reason"])  # of a trajectory its own, not its last row's
    rows, texts, conversations = [], rewards.solution_strs, agent_records(batch)
    for row in range(len(batch)):
        values = {"reward": scores[row], **{name: float(others[name][row]) for name in numeric}}
        truth = others["reward_model"][row] if "reward_model" in others else None
        rows.append(
            {
                "uid": str(others["uid"][row]),
                "data_source": str(others[source_key][row]),
                "prompt": _last_message(others, row),
                "response": texts[row],
                "ground_truth": truth.get("ground_truth") if isinstance(truth, dict) else None,
                "values": {name: value for name, value in values.items() if np.isfinite(value)},
                "pred": _given(others["pred"][row]) if "pred" in rewards.columns else None,
                "length": lengths[row],
                "truncated": bool(reasons[row] == "length"),
                "failed": row in rewards.failures,
                **{name: others[name][row] for name in ("outcome", "num_turns") if name in others},
                **conversations[row],
            }
        )
    return rows


def _given(value: Any) -> Any:
    """None where a reward function returned nothing: a column of numbers has NaN there."""
    return None if isinstance(value, float) and np.isnan(value) else value


def _last_message(others: dict[str, np.ndarray], row: int) -> str | None:
    column = others.get("raw_prompt")
    if column is None:
        return None
    messages = column[row]
    return messages if isinstance(messages, str) else str(messages[-1]["content"])
