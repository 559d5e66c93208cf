"""Hidden states of any transformers model for a padded batch, by the packed or the padded path.

The roles (`policy`, `value`) wrap a transformers model in an `nn.Module` whose forward returns what they need. FSDP is
applied to that wrapper, so its hooks gather the root's parameters (norm, head) before they are used here directly. For
the same reason the head must belong to the root's unit: never shard `lm_head` or `score` on their own.
Parameter names are transformers' names behind `hf_model.`. No loss and no sharding is done here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dovetail.models.attention import PACKED_ATTENTION, register_packed_attention, without_masks
from dovetail.models.multimodal import as_text, embeds_as_text, multimodal_position_ids, vision_tower_runs
from dovetail.models.packing import PackedBatch, pack_batch
from dovetail.parallel.ulysses import gather_outputs, get_ulysses_group, slice_inputs

HF_PREFIX = "hf_model."


class TokenLayout(Protocol):
    """How this rank's tokens lie in a flat row, and the way back to `[B, T]`."""

    def pack(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` to this rank's tokens, end to end."""
        ...

    def states(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The rows of `hidden` that belong to `tokens` of what `pack` returns; None: to all of them."""
        ...

    def unpack(self, values: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class PaddedLayout:
    shape: tuple[int, int]

    def pack(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)

    def states(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        return hidden if tokens is None else hidden[tokens]

    def unpack(self, values: Tensor) -> Tensor:
        return values.unflatten(0, self.shape)


@dataclass(frozen=True)
class PackedLayout:
    batch: PackedBatch
    group: ProcessGroup | None

    def pack(self, x: Tensor) -> Tensor:
        row = self.batch.pack(x)
        return row if self.group is None else slice_inputs(row, 0, self.group)

    def states(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        places = self.batch.places
        if places is None:
            return hidden if tokens is None else hidden[tokens]
        return hidden[places if tokens is None else places[tokens]]

    def unpack(self, values: Tensor) -> Tensor:
        row = values if self.group is None else gather_outputs(values, 0, self.group)
        return self.batch.unpack(row)


class TransformerBackbone(nn.Module):
    """Owns a transformers model and runs it up to its last hidden states."""

    def __init__(self, hf_model: Any, *, use_remove_padding: bool = True, share_prefixes: bool = False) -> None:
        """`share_prefixes`: what packed sequences of a batch begin with alike is computed once."""
        super().__init__()
        self.hf_model = hf_model
        self.use_remove_padding = use_remove_padding
        kinds = set(getattr(hf_model.config.get_text_config(), "layer_types", None) or ())
        # Layers with a state, such as linear attention, see what lies before a token in the row.
        self.share_prefixes = share_prefixes and kinds <= {"full_attention", "sliding_attention"}
        if use_remove_padding:
            hf_model.set_attn_implementation(register_packed_attention())

    def hidden_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None,
        multi_modal_inputs: Mapping[str, Tensor] | None,
    ) -> tuple[Tensor, TokenLayout]:
        """`[n, H]` for this rank's tokens, and where they belong. `position_ids`: `[B, T]` or `[B, C, T]`.

        Where images give tokens several positions, the model is asked for them unless they are there: `[B, T]` is not.
        """
        extra = dict(multi_modal_inputs or {})
        if position_ids is None or position_ids.dim() == 2:
            from_model = multimodal_position_ids(self.hf_model, input_ids, attention_mask, extra)
            position_ids = position_ids if from_model is None else from_model
        types = extra.pop("mm_token_type_ids", None)  # they have the padded shape, and the model has its positions
        around: AbstractContextManager[None] = nullcontext()
        if types is not None:
            input_ids, around = as_text(self.hf_model, input_ids, types == 0), embeds_as_text(self.hf_model)
        elif multi_modal_inputs is not None and not extra:
            # An empty mapping says: images are part of this run, and these rows have none.
            around = vision_tower_runs(self.hf_model)
        with around:
            return self._forward(input_ids, attention_mask, position_ids, extra)

    def _forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None, extra: dict[str, Any]
    ) -> tuple[Tensor, TokenLayout]:
        if self.use_remove_padding:
            return self._packed(input_ids, attention_mask, position_ids, extra)
        if get_ulysses_group() is not None:
            raise ValueError("Ulysses splits packed rows; set use_remove_padding=True to use sequence parallelism.")
        if position_ids is None:
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        elif position_ids.dim() == 3:
            position_ids = position_ids.transpose(0, 1)
        hidden = self._run(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **extra)
        return hidden.flatten(0, 1), PaddedLayout((input_ids.size(0), input_ids.size(1)))

    def output_layer(self, *names: str) -> nn.Module:
        """The layer after the hidden states, checked to be usable here."""
        layer = next((getattr(self.hf_model, n) for n in names if getattr(self.hf_model, n, None) is not None), None)
        if layer is None:
            raise ValueError(f"{type(self.hf_model).__name__} has no output layer called {' or '.join(names)}.")
        return checked_layer(layer)

    def _packed(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None, extra: dict[str, Any]
    ) -> tuple[Tensor, TokenLayout]:
        if self._attention_name() != PACKED_ATTENTION:
            raise ValueError(
                f"{type(self.hf_model).__name__} runs attention {self._attention_name()!r}, which would mix packed "
                f"sequences; it must be {PACKED_ATTENTION!r}, or set use_remove_padding=False."
            )
        group = get_ulysses_group()
        share = self.share_prefixes and group is None and not extra  # images belong to one sequence each
        batch = pack_batch(input_ids, attention_mask, position_ids, sp_group=group, share_prefixes=share)
        ids, positions = batch.input_ids, batch.position_ids
        base = self.hf_model.base_model
        decoder = base.get_decoder() if hasattr(base, "get_decoder") else base
        slicing: AbstractContextManager[None] = nullcontext()
        if group is not None and decoder is base:
            ids, positions = slice_inputs(ids, 1, group), slice_inputs(positions, positions.dim() - 1, group)
        elif group is not None:
            # Images are placed by counting their tokens in the whole row, so only what enters the decoder is cut.
            slicing = _decoder_sees_slice(decoder, group)
        with without_masks(), slicing:
            hidden = self._run(
                input_ids=ids, attention_mask=None, position_ids=positions, segments=batch.segments, **extra
            )
        return hidden.squeeze(0), PackedLayout(batch, group)

    def _run(self, **inputs: Any) -> Tensor:
        return self.hf_model.base_model(**inputs, use_cache=False).last_hidden_state

    def _attention_name(self) -> str:
        return self.hf_model.config.get_text_config()._attn_implementation


def checked_layer(layer: nn.Module) -> nn.Module:
    if isinstance(getattr(layer, "weight", None), DTensor):
        raise RuntimeError(
            "the output layer's weight is still sharded inside forward: it was given an FSDP unit of its own. "
            "Shard the transformer layers and the wrapper (root) only, so that the root gathers it."
        )
    return layer


def align_to_tokens(values: Tensor) -> Tensor:
    """`[B, T]` made at the state before each token: value `t` moves to `t + 1`, the token it is about."""
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)


def predicting_positions(attention_mask: Tensor, token_mask: Tensor | None) -> Tensor:
    """`[B, T]`: positions whose hidden state predicts a wanted token (its neighbour to the right)."""
    mask = attention_mask.bool()
    wanted = mask if token_mask is None else mask & token_mask.bool()
    return torch.cat([wanted[:, 1:] & mask[:, :-1], torch.zeros_like(mask[:, :1])], dim=1)


def concat_multi_modal_inputs(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the image columns of rows (`pixel_values`, `image_grid_thw`, ...) along their first axis, in row order.

    A processor's `mm_token_type_ids` have the length of a prompt, not of its images, and are left out.
    """
    names = {name: None for row in rows for name in row if name != "mm_token_type_ids"}
    return {name: torch.cat([row[name] for row in rows if name in row]) for name in names}


@contextmanager
def _decoder_sees_slice(decoder: nn.Module, group: ProcessGroup) -> Iterator[None]:
    def cut(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if kwargs.get("visual_pos_masks") is not None:
            raise NotImplementedError(
                f"{type(module).__name__} adds image features inside its layers, which sequence parallelism does not "
                "split; set ulysses_sequence_parallel_size=1 for this model."
            )
        positions = kwargs["position_ids"]
        kwargs["inputs_embeds"] = slice_inputs(kwargs["inputs_embeds"], 1, group)
        kwargs["position_ids"] = slice_inputs(positions, positions.dim() - 1, group)
        return args, kwargs

    handle = decoder.register_forward_pre_hook(cut, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
