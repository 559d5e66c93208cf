"""A batch as rows for people: each answer's record, and the numbers of its tokens. Written to the run folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.protocol import DataProto
from dovetail.rewards.records import answer_records


def rollout_rows(batch: DataProto, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """One dict per answer: `answer_records`, and per token its id, advantage, log-prob gap and entropy."""
    columns = batch.tensors
    width = columns["responses"].shape[1]
    kept = columns["attention_mask"][:, -width:].bool()
    tokens = {"response_ids": columns["responses"], "token_advantages": columns["advantages"]}
    if "old_log_probs" in columns and "rollout_log_probs" in columns:
        tokens["token_logprob_gaps"] = columns["old_log_probs"] - columns["rollout_log_probs"]
    if "entropys" in columns:
        tokens["token_entropies"] = columns["entropys"]
    reasons = batch.non_tensor_batch["finish_reason"]
    for row, record in enumerate(answer_records(batch, tokenizer)):
        values = {name: _rounded(column[row][kept[row]].tolist()) for name, column in tokens.items()}
        yield {**record, "truncated": reasons[row] == "length", **values}


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 5) if isinstance(value, float) else value for value in values]
