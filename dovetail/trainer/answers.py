"""A batch as rows for people: what was asked, what was answered, how it was scored. Written to the run folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dovetail.protocol import DataProto


def rollout_rows(batch: DataProto, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """One dict per answer, with the numbers of its tokens."""
    columns, others = batch.tensors, batch.non_tensor_batch
    width = columns["responses"].shape[1]
    attention = columns["attention_mask"].bool()
    scores = columns["token_level_scores"].sum(dim=1)
    gap = None
    if "old_log_probs" in columns and "rollout_log_probs" in columns:
        gap = columns["old_log_probs"] - columns["rollout_log_probs"]
    for row in range(len(batch)):
        prompt = columns["prompts"][row][attention[row, :-width]]
        kept = attention[row, -width:]
        response = columns["responses"][row][kept]
        found = {
            "uid": str(others["uid"][row]),
            "prompt": tokenizer.decode(prompt),
            "response": tokenizer.decode(response),
            "response_ids": response.tolist(),
            "score": float(scores[row]),
            "length": int(kept.sum()),
            "truncated": bool(others["finish_reason"][row] == "length") if "finish_reason" in others else None,
            "failed": bool(columns["reward_failed"][row]) if "reward_failed" in columns else False,
            "ground_truth": _truth(others, row),
            "advantages": _rounded(columns["advantages"][row][kept]),
        }
        if gap is not None:
            found["log_prob_gap"] = _rounded(gap[row][kept])
        if "entropys" in columns:
            found["entropy"] = _rounded(columns["entropys"][row][kept])
        for name in ("acc", "pred"):
            if name in others:
                found[name] = others[name][row]
        yield found


def _truth(others: dict[str, np.ndarray], row: int) -> Any:
    column = others.get("reward_model")
    return column[row].get("ground_truth") if column is not None and isinstance(column[row], dict) else None


def _rounded(values: Any) -> list[float]:
    return [round(value, 5) for value in values.tolist()]
