"""A batch as readable rows for the run folder: each response's record, and its numbers per token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dovetail.protocol import DataProto
from dovetail.rewards.answers import response_attention
from dovetail.rewards.columns import answer_records
from dovetail.trainer.agent_records import agent_records
from dovetail.trainer.token_text import token_ends

# Per-token numbers are for people to look at. Beyond this many tokens a step's file holds its responses without them.
MOST_TOKENS = 500_000
_ROWS_AT_ONCE = 32


class RolloutRows:
    """Rows of one run's batches. Remembers what tokens decode to by themselves."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def of(self, batch: DataProto) -> Iterator[dict[str, Any]]:
        """A dict per response: `answer_records` and its tokens' id, end in the text, advantage, mismatch, entropy, and
        the versions of the weights that sampled them as `[[version, count], ...]`.

        Written beside a step that runs: what is per token is left to numpy.
        """
        room = MOST_TOKENS
        # A few rows at a time: for a large batch of long responses each temporary column would take gigabytes, and what
        # is done for all of them at once holds up the update.
        conversations = agent_records(batch)
        for first, part in zip(range(0, len(batch), _ROWS_AT_ONCE), batch.split(_ROWS_AT_ONCE), strict=True):
            lengths = response_attention(part).sum(dim=1)
            shown = int((lengths.cumsum(0) <= room).sum())
            tokens = self._tokens(part[:shown]) if shown else []
            for row, record in enumerate(answer_records(part, self._tokenizer)):
                record["truncated"] = part.non_tensor_batch["finish_reason"][row] == "length"
                yield (record if row >= shown else self._with_tokens(record, tokens[row])) | conversations[first + row]
            # After the first answer that does not fit, none gets its tokens.
            room = room - int(lengths.sum()) if shown == len(part) else 0

    def _tokens(self, batch: DataProto) -> list[dict[str, np.ndarray]]:
        """What is known of each row's tokens."""
        columns = batch.tensors
        kept = response_attention(batch).bool().numpy()
        responses = columns["responses"].numpy()
        tokens = {"response_ids": responses, "token_advantages": _rounded(columns["advantages"])}
        if "old_log_probs" in columns and "rollout_log_probs" in columns:
            tokens["token_logprob_gaps"] = _rounded(columns["old_log_probs"] - columns["rollout_log_probs"])
        if "outcome" in batch.non_tensor_batch:
            tokens["token_mask"] = columns["response_mask"].numpy()
        if "entropys" in columns:
            tokens["token_entropies"] = _rounded(columns["entropys"])
        if "weight_version" in columns:
            tokens["token_versions"] = columns["weight_version"].numpy()
        self._decode(responses[kept])
        rows = [{name: column[row][kept[row]] for name, column in tokens.items()} for row in range(len(batch))]
        # Of the first mini-batch's rows old log-probs may not be known yet (`PartialLogProbs`).
        return [{name: values for name, values in row.items() if not np.isnan(values).any()} for row in rows]

    def _with_tokens(self, record: dict[str, Any], tokens: dict[str, np.ndarray]) -> dict[str, Any]:
        ends = token_ends(record["response"], list(map(self._pieces.__getitem__, tokens["response_ids"].tolist())))
        if "token_versions" in tokens:
            tokens = {**tokens, "token_versions": _runs(tokens["token_versions"])}
        return {**record, **tokens, "token_ends": np.asarray(ends)}

    def _decode(self, tokens: np.ndarray) -> None:
        """What each token decodes to by itself; special tokens are not in an answer's text."""
        new = [token for token in np.unique(tokens).tolist() if token not in self._pieces]
        if new:
            texts = self._tokenizer.batch_decode([[token] for token in new], skip_special_tokens=True)
            self._pieces.update(zip(new, texts, strict=True))


def _runs(values: np.ndarray) -> np.ndarray:
    """`[[value, how many times in a row], ...]`."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return np.stack([values[starts], np.diff(starts, append=len(values))], axis=1)


def _rounded(column: torch.Tensor) -> np.ndarray:
    return column.double().numpy().round(5)
