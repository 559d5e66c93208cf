"""A batch as rows for people: each answer's record, and the numbers of its tokens. Written to the run folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dovetail.protocol import DataProto
from dovetail.rewards.records import answer_records
from dovetail.trainer.token_text import token_ends

# Numbers of single tokens are for eyes. Beyond this many tokens a step's file holds its answers without them.
MOST_TOKENS = 500_000


def rollout_rows(batch: DataProto, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """A dict per answer: `answer_records`, and of its tokens id, end in the text, advantage, log-prob gap, entropy."""
    columns = batch.tensors
    width = columns["responses"].shape[1]
    kept = columns["attention_mask"][:, -width:].bool()
    tokens = {"response_ids": columns["responses"], "token_advantages": columns["advantages"]}
    if "old_log_probs" in columns and "rollout_log_probs" in columns:
        tokens["token_logprob_gaps"] = columns["old_log_probs"] - columns["rollout_log_probs"]
    if "entropys" in columns:
        tokens["token_entropies"] = columns["entropys"]
    reasons = batch.non_tensor_batch["finish_reason"]
    pieces = _pieces(columns["responses"], kept, tokenizer)
    written = 0
    for row, record in enumerate(answer_records(batch, tokenizer)):
        record["truncated"] = reasons[row] == "length"
        written += int(kept[row].sum())
        if written > MOST_TOKENS:
            yield record
            continue
        values = {name: _rounded(column[row][kept[row]].tolist()) for name, column in tokens.items()}
        ends = token_ends(record["response"], [pieces[int(token)] for token in values["response_ids"]])
        yield {**record, **values, "token_ends": ends}


def _pieces(responses: torch.Tensor, kept: torch.Tensor, tokenizer: Any) -> dict[int, str]:
    """What each token of the batch decodes to by itself; special tokens are not in an answer's text."""
    found = responses[kept].unique().tolist()
    return dict(zip(found, tokenizer.batch_decode([[token] for token in found], skip_special_tokens=True), strict=True))


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 5) if isinstance(value, float) else value for value in values]
