"""Answers of a batch: token ids, and text once somebody reads it. Scores nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from dovetail.protocol import DataProto
from dovetail.rewards.decoding import TokenIds
from dovetail.rewards.functions import ARGUMENTS


class Decoder(Protocol):
    """The part of a tokenizer that is used here."""

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]: ...


@dataclass(eq=False)
class Answer:
    """One response with what is needed to score it. `token_ids` are all its tokens, tool output included.

    Scoring processes decode; here text is made when it is read and no process has sent it.
    """

    data_source: str
    ground_truth: Any
    extra_info: Any
    token_ids: np.ndarray
    decoder: Decoder
    text: str | None = None

    @property
    def response_length(self) -> int:
        return len(self.token_ids)

    @property
    def solution_str(self) -> str:
        """The response as text, without special tokens."""
        if self.text is None:
            (self.text,) = self.decoder.batch_decode([self.token_ids], skip_special_tokens=True)
        return self.text

    def packed(self) -> TokenIds:
        return TokenIds(self.token_ids.astype(np.int32, copy=False).tobytes())

    def arguments(self, solution: Any) -> dict[str, Any]:
        """The arguments of a reward function, with the response in the form that it takes."""
        values = (self.data_source, solution, self.ground_truth, self.extra_info)
        return dict(zip(ARGUMENTS, values, strict=True))


def read_answers(batch: DataProto, tokenizer: Decoder, *, reward_fn_key: str = "data_source") -> list[Answer]:
    """One answer per row."""
    columns = batch.non_tensor_batch
    if reward_fn_key not in columns:
        raise ValueError(
            f"the batch has no column {reward_fn_key!r} to choose a reward by; it has {', '.join(sorted(columns))}. "
            "Set data.reward_fn_key to one of them."
        )
    empty = [None] * len(batch)
    truths, infos = columns.get("reward_model", empty), columns.get("extra_info", empty)
    if "outcome" in columns:
        infos = [{**(info or {}), **facts} for info, facts in zip(infos, trajectory_facts(batch), strict=True)]
    ids = _real_tokens(batch.tensors["responses"], response_attention(batch))
    return [
        Answer(str(source), _ground_truth(truth), {} if info is None else info, tokens, tokenizer)
        for source, truth, info, tokens in zip(columns[reward_fn_key], truths, infos, ids, strict=True)
    ]


def trajectory_facts(batch: DataProto) -> list[dict[str, Any]]:
    """What a reward function is told of an agent's trajectory, in `extra_info`."""
    columns = batch.non_tensor_batch
    names = [name for name in ("messages", "num_turns", "outcome") if name in columns]
    loops = [
        [event for event in row or () if event["kind"] == "loop"] for row in columns.get("events", [()] * len(batch))
    ]
    facts = [  # an agent loop for verl may add fields of its own
        {**(loop[-1]["extra_fields"] if loop else {}), **{name: columns[name][row] for name in names}}
        for row, loop in enumerate(loops)
    ]
    for fact in facts:
        said = [m["content"] for m in fact.get("messages") or () if m["role"] == "assistant" and m.get("content")]
        fact["final_response"] = said[-1] if said else ""
    return facts


def decode_responses(batch: DataProto, tokenizer: Decoder) -> list[str]:
    """The response of each row as text, without special tokens."""
    ids = _real_tokens(batch.tensors["responses"], response_attention(batch))
    return tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []


def decode_prompts(batch: DataProto, tokenizer: Decoder, *, skip_special_tokens: bool = False) -> list[str]:
    """The prompt of each row as text; special tokens show how the chat template was filled in."""
    prompts = batch.tensors["prompts"]
    ids = _real_tokens(prompts, batch.tensors["attention_mask"][:, : prompts.shape[1]])
    return tokenizer.batch_decode(ids, skip_special_tokens=skip_special_tokens) if ids else []


def response_attention(batch: DataProto) -> torch.Tensor:
    """The attention mask over the response part."""
    return batch.tensors["attention_mask"][:, -batch.tensors["responses"].shape[1] :]


def last_response_token(batch: DataProto) -> torch.Tensor:
    """Where a row's score goes: its last sampled token, or its last token when none was sampled."""
    sampled = batch.tensors["response_mask"].bool()
    real = response_attention(batch).bool()
    kept = torch.where(sampled.any(dim=-1, keepdim=True), sampled, real)
    # The last True is the first of the row read backwards; 0 when there is none.
    last = kept.shape[1] - 1 - kept.flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.where(kept.any(dim=-1), last, 0)


def _ground_truth(reward_model: Any) -> Any:
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else reward_model


def _real_tokens(ids: torch.Tensor, mask: torch.Tensor) -> list[np.ndarray]:
    # Arrays: of a list the tokenizer looks at every number first.
    return [row[kept] for row, kept in zip(ids.numpy(), mask.bool().numpy(), strict=True)]
