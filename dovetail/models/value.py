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

from dovetail.models.backbone import TransformerBackbone, align_to_tokens, checked_layer

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

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        *,
        multi_modal_inputs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """What the subclass reads, in float32, from the head at every token, which is 0 on padding."""
        hidden, layout = self.hidden_states(input_ids, attention_mask, position_ids, multi_modal_inputs)
        layer = checked_layer(self.score) if self.score is not None else self.output_layer(*_HEAD_NAMES)
        scores = layer(layout.states(hidden))
        if scores.size(-1) != 1:
            raise ValueError(
                f"{type(self.hf_model).__name__} gives {scores.size(-1)} numbers a token, a scalar head gives one; "
                "load it with num_labels=1."
            )
        return self._read(layout.unpack(scores.squeeze(-1).float()) * attention_mask, attention_mask)

    def _read(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        raise NotImplementedError


class ValueModel(_ScalarHeadModel):
    """State values of a critic."""

    def _read(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        """`[B, T]`: the value of the state before token t, so that responses are `values[:, -R:]`."""
        return align_to_tokens(scores)


class RewardModel(_ScalarHeadModel):
    """Scores of whole sequences, read at their last token."""

    def _read(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        """`[B]`."""
        positions = torch.arange(attention_mask.size(1), device=attention_mask.device)
        last = (positions * attention_mask.bool()).argmax(dim=1)
        # Not a view of `scores`: FSDP2 hangs its backward hook on what is returned.
        return scores[torch.arange(len(scores), device=scores.device), last]
