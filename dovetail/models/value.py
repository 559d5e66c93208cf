"""A value per token (`ValueModel`) and a score per sequence (`RewardModel`).

Both wrap transformers models with a scalar head: token classification, sequence classification, or a bare
model that gets a head here (architectures without a classification class, such as vision-language models). Dropout
before the head, which transformers adds to token classifiers, is left out: a critic's target must not be noisy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.models.backbone import TransformerBackbone, checked_layer
from dovetail.models.token_batch import Reads, TokenBatch

_HEAD_NAMES = ("score", "classifier")


class _ScalarHeadModel(TransformerBackbone):
    def __init__(self, hf_model: Any, *, use_remove_padding: bool = True) -> None:
        super().__init__(hf_model, use_remove_padding=use_remove_padding)
        owned = any(getattr(hf_model, name, None) is not None for name in _HEAD_NAMES)
        reference = next(hf_model.parameters())
        self.score: nn.Linear | None = None
        if not owned:
            size = hf_model.config.get_text_config().hidden_size
            self.score = nn.Linear(size, 1, bias=False, device=reference.device, dtype=reference.dtype)

    def forward(self, batch: TokenBatch, *, multi_modal_inputs: Mapping[str, Tensor] | None = None) -> Tensor:
        """What the head says of the states that the subclass reads, in float32; 0 in other places of the result.

        `batch`: what `prepare` made, on the device.
        """
        hidden = self.hidden_states(batch, multi_modal_inputs)
        layer = checked_layer(self.score) if self.score is not None else self.output_layer(*_HEAD_NAMES)
        scores = layer(hidden)
        if scores.size(-1) != 1:
            raise ValueError(
                f"{type(self.hf_model).__name__} gives {scores.size(-1)} numbers a token, a scalar head gives one; "
                "load it with num_labels=1."
            )
        return batch.spread(scores.squeeze(-1).float()[batch.states])


class ValueModel(_ScalarHeadModel):
    """State values of a critic: `[B, T]`, the value of the state before token t, so that responses are
    `values[:, -R:]`."""

    def _reads(self, attention_mask: Tensor, token_mask: Tensor | None) -> Reads:
        rows, columns = attention_mask[:, :-1].nonzero(as_tuple=True)
        return Reads(rows, columns, (rows, columns + 1), tuple(attention_mask.shape))


class RewardModel(_ScalarHeadModel):
    """Scores of whole sequences, `[B]`, read at their last token."""

    def _reads(self, attention_mask: Tensor, token_mask: Tensor | None) -> Reads:
        mask = attention_mask.bool()
        last = (torch.arange(mask.size(1)) * mask).argmax(dim=1)
        (rows,) = mask.any(dim=1).nonzero(as_tuple=True)
        return Reads(rows, last[rows], (rows,), (mask.size(0),))
