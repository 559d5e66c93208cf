"""Answers as text, from the token ids of a batch. The one place where responses are decoded; scores nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dovetail.protocol import DataProto


class Decoder(Protocol):
    """The part of a tokenizer that is used here."""

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]: ...


@dataclass(frozen=True)
class Answer:
    """One response with what is needed to score it. `response_length` counts tokens, tool output included."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Any
    response_length: int


def read_answers(batch: DataProto, tokenizer: Decoder, *, reward_fn_key: str = "data_source") -> list[Answer]:
    """One answer per row."""
    texts = decode_responses(batch, tokenizer)
    lengths = response_attention(batch).sum(dim=-1).tolist()
    columns = batch.non_tensor_batch
    if reward_fn_key not in columns:
        raise ValueError(
            f"the batch has no column {reward_fn_key!r} to choose a reward by; it has {', '.join(sorted(columns))}. "
            "Set data.reward_fn_key to one of them."
        )
    empty = [None] * len(batch)
    truths, infos = columns.get("reward_model", empty), columns.get("extra_info", empty)
    return [
        Answer(str(source), text, _ground_truth(truth), {} if info is None else info, int(length))
        for source, text, truth, info, length in zip(columns[reward_fn_key], texts, truths, infos, lengths, strict=True)
    ]


def decode_responses(batch: DataProto, tokenizer: Decoder) -> list[str]:
    """The response of each row as text, without special tokens."""
    return _decode(batch.tensors["responses"], response_attention(batch), tokenizer)


def decode_prompts(batch: DataProto, tokenizer: Decoder, *, skip_special_tokens: bool = False) -> list[str]:
    """The prompt of each row as text; special tokens show how the chat template was filled in."""
    prompts = batch.tensors["prompts"]
    mask = batch.tensors["attention_mask"][:, : prompts.shape[1]]
    return _decode(prompts, mask, tokenizer, skip_special_tokens)


def response_attention(batch: DataProto) -> torch.Tensor:
    """The attention mask over the response part."""
    return batch.tensors["attention_mask"][:, -batch.tensors["responses"].shape[1] :]


def last_response_token(batch: DataProto) -> torch.Tensor:
    """Where a row's score goes: its last sampled token, or its last token when none was sampled."""
    sampled = batch.tensors["response_mask"].bool()
    real = response_attention(batch).bool()
    kept = torch.where(sampled.any(dim=-1, keepdim=True), sampled, real)
    places = torch.arange(kept.shape[1], device=kept.device)
    return torch.where(kept, places, 0).amax(dim=-1)


def _ground_truth(reward_model: Any) -> Any:
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else reward_model


def _decode(ids: torch.Tensor, mask: torch.Tensor, tokenizer: Decoder, skip_special_tokens: bool = True) -> list[str]:
    # Arrays: of a list the tokenizer looks at every number first.
    rows = [row[kept] for row, kept in zip(ids.numpy(), mask.bool().numpy(), strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=skip_special_tokens) if rows else []
