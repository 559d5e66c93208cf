"""Put prompts and responses, as token ids, into the one padded batch every later stage reads. Tokenises nothing.

Prompts are padded on the left, responses on the right, so response token i stands in the same column in every row. A
response may hold tokens the model did not write (tool output, the next user turn): they are attended to, but
`response_mask` is 0 there and they have no log-prob and no weight version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from dovetail.protocol import DataProto
from dovetail.protocol.columns import PAD_TOKEN_ID
from dovetail.protocol.routed_experts import ROUTED_EXPERTS
from dovetail.protocol.sampling_mask import SAMPLING_MASK, join_masks, make_mask
from dovetail.rollout.base import FinishReason, GenerationResult

# Weight version of tokens the engine did not write, and of padding.
NO_VERSION = -1


Rows = Sequence[Sequence[int]] | Sequence[Sequence[float]] | Sequence[Sequence[bool]]


@dataclass(frozen=True, slots=True)
class Response:
    """Everything after the prompt, over one or more turns. `sampled[i]` says whether the model wrote token i."""

    token_ids: tuple[int, ...] = ()
    sampled: tuple[bool, ...] = ()
    log_probs: tuple[float, ...] = ()
    weight_versions: tuple[int, ...] = ()
    finish_reason: FinishReason | None = field(default=None)
    sampling_mask: np.ndarray | None = field(default=None, compare=False)
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    """Of a response of one turn."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.sampled), len(self.log_probs), len(self.weight_versions)}
        assert len(lengths) == 1, f"a response has one entry per token in every list, not lengths {sorted(lengths)}"

    def with_result(self, result: GenerationResult) -> Response:
        """The response followed by a turn the model wrote."""
        return Response(
            self.token_ids + tuple(result.token_ids),
            self.sampled + (True,) * len(result.token_ids),
            self.log_probs + tuple(result.log_probs),
            self.weight_versions + tuple(result.weight_versions),
            result.finish_reason,
            join_masks(self.sampling_mask, len(self.token_ids), result.sampling_mask),
            result.routed_experts,
        )

    def with_tokens(self, token_ids: Sequence[int]) -> Response:
        """The response followed by tokens the model only reads."""
        return Response(
            self.token_ids + tuple(token_ids),
            self.sampled + (False,) * len(token_ids),
            self.log_probs + (0.0,) * len(token_ids),
            self.weight_versions + (NO_VERSION,) * len(token_ids),
            self.finish_reason,
            self.sampling_mask,
        )


def assemble(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Response | GenerationResult],
    *,
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> DataProto:
    """One row per response; `prompts[i]` is what `responses[i]` answers, so repeat a prompt for its n samples.

    Widths default to the longest row. Numbers are as narrow as is exact: ids and positions int32, masks int8.

    Columns: prompts, responses, input_ids, attention_mask, position_ids, response_mask, rollout_log_probs,
    weight_version, and the numpy columns finish_reason and, where responses have them, sampling_mask and
    routed_experts.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts for {len(responses)} responses; give one prompt per response.")
    rows = [r if isinstance(r, Response) else Response().with_result(r) for r in responses]
    prompt_width = _width("prompt", prompts, prompt_length)
    # At least one column: a slice of the last 0 columns is a slice of all.
    response_width = max(1, _width("response", [r.token_ids for r in rows], response_length))

    prompt_ids = _padded(prompts, prompt_width, pad_token_id, np.int32, left=True)
    response_ids = _padded([r.token_ids for r in rows], response_width, pad_token_id, np.int32)
    real = [_is_real(prompts, prompt_width, left=True), _is_real([r.token_ids for r in rows], response_width)]
    attention_mask = torch.from_numpy(np.concatenate(real, axis=1).astype(np.int8))
    return DataProto.from_dict(
        tensors={
            "prompts": prompt_ids,
            "responses": response_ids,
            "input_ids": torch.cat([prompt_ids, response_ids], dim=1),
            "attention_mask": attention_mask,
            "position_ids": attention_mask.cumsum(dim=1, dtype=torch.int32).sub_(1).clamp_(min=0),
            "response_mask": _padded([r.sampled for r in rows], response_width, 0, np.int8),
            "rollout_log_probs": _padded([r.log_probs for r in rows], response_width, 0.0, np.float32),
            "weight_version": _padded([r.weight_versions for r in rows], response_width, NO_VERSION, np.int32),
        },
        non_tensors={"finish_reason": [r.finish_reason for r in rows], **_masks(rows), **_experts(rows)},
        meta_info={PAD_TOKEN_ID: pad_token_id},
    )


def _masks(rows: Sequence[Response]) -> dict[str, list[np.ndarray]]:
    masks = [row.sampling_mask for row in rows]
    if all(mask is None for mask in masks):
        return {}
    return {SAMPLING_MASK: [make_mask([]) if mask is None else mask for mask in masks]}


def _experts(rows: Sequence[Response]) -> dict[str, list[np.ndarray]]:
    known = next((row.routed_experts for row in rows if row.routed_experts is not None), None)
    if known is None:
        return {}
    return {ROUTED_EXPERTS: [known[:0] if row.routed_experts is None else row.routed_experts for row in rows]}


def _width(what: str, rows: Sequence[Sequence[int]], wanted: int | None) -> int:
    longest = max((len(row) for row in rows), default=0)
    if wanted is None:
        return longest
    if longest > wanted:
        raise ValueError(f"a {what} has {longest} tokens, more than {what}_length={wanted}; truncate it first.")
    return wanted


def _padded(rows: Rows, width: int, value: float, dtype: type[np.number], *, left: bool = False) -> torch.Tensor:
    out = np.full((len(rows), width), value, dtype=dtype)
    out[_is_real(rows, width, left=left)] = np.fromiter(chain.from_iterable(rows), dtype, sum(map(len, rows)))
    return torch.from_numpy(out)


def _is_real(rows: Rows, width: int, *, left: bool = False) -> np.ndarray:
    """Where rows that are padded to this width, on the right or on the left, have an entry of their own."""
    columns = np.arange(width)[::-1] if left else np.arange(width)
    return columns < np.fromiter(map(len, rows), np.int64, len(rows))[:, None]
