"""Bring columns about responses to one width. A batch is as wide as its longest response, so batches differ.

Responses are padded on the right, so padding adds columns there and changes no token. Knows names, not batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

PAD_TOKEN_ID = "pad_token_id"
"""Key of meta_info: what `responses` and `input_ids` are padded with. 0 where nobody said."""

_TOKEN_IDS = frozenset({"responses", "input_ids"})
_POSITIONS = "position_ids"
# Everything else is 0 on padding: masks, log-probs, scores, advantages.
_FILL = {"weight_version": -1}

RESPONSE_COLUMNS = frozenset(
    {
        *("responses", "response_mask", "rollout_log_probs", "weight_version"),
        *("rm_scores", "token_level_scores", "token_level_rewards"),
        *("old_log_probs", "entropys", "sum_pi_squared", "ref_log_prob", "values", "rollout_is_weights"),
        *("advantages", "returns"),
    }
)
SEQUENCE_COLUMNS = frozenset({"input_ids", "attention_mask", _POSITIONS})
"""Prompt and response: as many columns more as the response has."""


def concat_tokens(name: str, parts: Sequence[torch.Tensor], pad_token_id: int) -> torch.Tensor:
    """Put a column's parts below each other, as wide as the widest. They must differ in width alone."""
    widest = max(part.shape[-1] for part in parts)
    rows = sum(len(part) for part in parts)
    fill = pad_token_id if name in _TOKEN_IDS else _FILL.get(name, 0)
    # One column of the result, filled part by part: padded copies of the parts would be held beside it.
    joined = parts[0].new_empty((rows, *parts[0].shape[1:-1], widest))
    first = 0
    for part in parts:
        place, width = joined[first : first + len(part)], part.shape[-1]
        place[..., :width] = part
        if width < widest:
            # Padding after the last token keeps its position.
            place[..., width:] = part[..., -1:] if name == _POSITIONS else fill
        first += len(part)
    return joined


def differ_in_width(name: str, parts: Sequence[torch.Tensor]) -> bool:
    """Whether these are parts of a column about responses that are alike but for their widths."""
    if name not in RESPONSE_COLUMNS | SEQUENCE_COLUMNS or len({part.shape[-1] for part in parts if part.dim()}) <= 1:
        return False
    return len({(part.dtype, part.dim(), part.shape[1:-1]) for part in parts}) == 1
