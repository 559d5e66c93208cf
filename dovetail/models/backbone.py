"""Hidden states of any transformers model for a padded batch, by the packed or the padded path.

The roles (`policy`, `value`) wrap a transformers model in an `nn.Module` whose forward returns what they need. FSDP is
applied to that wrapper, so its hooks gather the root's parameters (norm, head) before they are used here directly. For
the same reason the head must belong to the root's unit: never shard `lm_head` or `score` on their own. `prepare` packs
a padded batch on the host, `forward` takes what it made once that is on the device, and waits for nothing.
Parameter names are transformers' names behind `hf_model.`. No loss and no sharding is done here.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from dovetail.models.attention import PACKED_ATTENTION, no_mask, register_packed_attention
from dovetail.models.errors import ModelError, PackingError
from dovetail.models.longrope import length_of_one_set
from dovetail.models.multimodal import (
    TOKEN_TYPES,
    as_text,
    embeds_as_text,
    image_mask_keyword,
    multimodal_position_ids,
    vision_tower_runs,
)
from dovetail.models.packing import pack_batch
from dovetail.models.router_replay import RouterReplay
from dovetail.models.token_batch import Reads, TokenBatch, packed_tokens, padded_tokens
from dovetail.parallel.ulysses import get_ulysses_group, slice_inputs

logger = logging.getLogger(__name__)

HF_PREFIX = "hf_model."


class TransformerBackbone(nn.Module):
    """Owns a transformers model and runs it up to its last hidden states."""

    def __init__(
        self,
        hf_model: Any,
        *,
        use_remove_padding: bool = True,
        share_prefixes: bool = False,
        router_replay: RouterReplay | None = None,
    ) -> None:
        """`share_prefixes`: what packed sequences of a batch begin with alike is computed once. `router_replay`: of
        this model, where its experts may be recorded and replayed."""
        super().__init__()
        self.router_replay = router_replay
        self.hf_model = hf_model
        self.use_remove_padding = use_remove_padding
        self.share_prefixes = share_prefixes
        self.image_mask_keyword = image_mask_keyword(hf_model)
        self._fixed_rope_length = length_of_one_set(hf_model.config.get_text_config())
        refuse_other_backbones(hf_model)
        refuse_bidirectional(hf_model)
        if use_remove_padding:
            refuse_to_pack(hf_model)
            hf_model.set_attn_implementation(register_packed_attention())
        # Routers of Mixtral and PhiMoE have noise in training, and log-probs under it are not those of an engine.
        self._noisy = [part for part in hf_model.modules() if any("jitter" in name for name in vars(part))]

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for part in self._noisy:
            part.training = False
        return self

    def prepare(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        *,
        token_mask: Tensor | None = None,
        multi_modal_inputs: Mapping[str, Tensor] | None = None,
        routed_experts: Sequence[np.ndarray] | None = None,
    ) -> TokenBatch:
        """What `forward` takes, on the host, as the columns have to be: all are padded `[B, T]`.

        `position_ids` may be `[B, C, T]`; where images give tokens several positions, the model is asked for them
        unless they are there. `token_mask` marks the tokens that a policy's log-probs are wanted of (default: all).
        `routed_experts`: one array a row (`protocol.routed_experts`), to be replayed.
        """
        if input_ids.device.type != "cpu":
            raise ValueError(
                f"input_ids is on {input_ids.device}; batches are packed on the host, so pass tensors of the host."
            )
        media = multi_modal_inputs or {}
        if media and self.use_remove_padding and self.image_mask_keyword is not None:
            raise ModelError(
                f"{type(self.hf_model).__name__} lets the tokens of an image attend to later ones, which packed "
                "attention does not compute; set use_remove_padding=False for this model."
            )
        if position_ids is None or position_ids.dim() == 2:
            from_model = multimodal_position_ids(self.hf_model, input_ids, attention_mask, media)
            position_ids = position_ids if from_model is None else from_model
        self._warn_of_long_rows(attention_mask)
        reads = self._reads(attention_mask, token_mask)
        labels = input_ids.roll(-1, dims=1)[reads.rows, reads.columns]
        if TOKEN_TYPES in media:
            input_ids = as_text(self.hf_model, input_ids, media[TOKEN_TYPES] == 0)
        group = get_ulysses_group()
        if not self.use_remove_padding:
            if group is not None:
                raise ValueError("Ulysses splits packed rows; set use_remove_padding=True to use sequence parallelism.")
            tokens = padded_tokens(input_ids, attention_mask, position_ids, reads, labels)
            return self._with_experts(tokens, routed_experts)
        if self._attention_name() != PACKED_ATTENTION:
            raise ValueError(
                f"{type(self.hf_model).__name__} runs attention {self._attention_name()!r}, which would mix packed "
                f"sequences; it must be {PACKED_ATTENTION!r}, or set use_remove_padding=False."
            )
        share = self.share_prefixes and group is None and not media  # images belong to one sequence each
        batch = pack_batch(input_ids, attention_mask, position_ids, sp_group=group, share_prefixes=share)
        # Images are placed by counting their tokens in the whole row, so only what enters the decoder is cut.
        tokens = packed_tokens(batch, reads, labels, whole_row=self._decoder() is not self.hf_model.base_model)
        return self._with_experts(tokens, routed_experts)

    def _with_experts(self, batch: TokenBatch, routed_experts: Sequence[np.ndarray] | None) -> TokenBatch:
        if self.router_replay is None:
            return replace(batch, places=None)
        return batch if routed_experts is None else batch.with_experts(routed_experts)

    def hidden_states(
        self, batch: TokenBatch, multi_modal_inputs: Mapping[str, Tensor] | None, *, record_experts: bool = False
    ) -> Tensor:
        """`[n, H]`: the last ones of all this rank's tokens."""
        if self.router_replay is not None:
            self.router_replay.begin(batch.routed_experts, record=record_experts)
        packed = {} if batch.segments is None else {"segments": batch.segments}
        with ExitStack() as around:
            for context in self._around(batch, multi_modal_inputs):
                around.enter_context(context)
            hidden = self.hf_model.base_model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                position_ids=batch.position_ids,
                use_cache=False,
                **packed,
                **(multi_modal_inputs or {}),
            ).last_hidden_state
        return hidden.flatten(0, 1)

    def output_layer(self, *names: str) -> nn.Module:
        """The layer after the hidden states, checked to be usable here."""
        layer = next((getattr(self.hf_model, n) for n in names if getattr(self.hf_model, n, None) is not None), None)
        if layer is None:
            raise ValueError(f"{type(self.hf_model).__name__} has no output layer called {' or '.join(names)}.")
        return checked_layer(layer)

    def _warn_of_long_rows(self, attention_mask: Tensor) -> None:
        if self._fixed_rope_length is None or (longest := int(attention_mask.sum(1).max())) <= self._fixed_rope_length:
            return
        logger.warning(
            "a row has %d tokens, and above %d the rotary embedding of %s depends on the longest row of a micro-batch: "
            "log-probs differ from the engine's, and with the rows that share one. Keep max_prompt_length and "
            "max_response_length together within %d.",
            longest, self._fixed_rope_length, type(self.hf_model).__name__, self._fixed_rope_length,
        )  # fmt: skip
        self._fixed_rope_length = None  # once

    def _reads(self, attention_mask: Tensor, token_mask: Tensor | None) -> Reads:
        """The states that the head of this model reads."""
        raise NotImplementedError(f"{type(self).__name__} does not say which states its head reads.")

    def _around(self, batch: TokenBatch, media: Mapping[str, Tensor] | None) -> Iterator[AbstractContextManager[None]]:
        if media:
            yield embeds_as_text(self.hf_model)
        elif media is not None:
            # An empty mapping says: images are part of this run, and these rows have none.
            yield vision_tower_runs(self.hf_model)
        group = None if batch.segments is None else batch.segments.sp_group
        if group is not None and self._decoder() is not self.hf_model.base_model:
            yield _decoder_sees_slice(self._decoder(), group)

    def _decoder(self) -> nn.Module:
        base = self.hf_model.base_model
        return base.get_decoder() if hasattr(base, "get_decoder") else base

    def _attention_name(self) -> str:
        return self.hf_model.config.get_text_config()._attn_implementation


def window_in_mask_only(text_config: Any) -> int | None:
    """The window that attention is not told of, if sequences can be longer."""
    window, positions = (getattr(text_config, key, None) for key in ("sliding_window", "max_position_embeddings"))
    is_told = text_config.model_type not in ("phimoe", "qwen2_moe")  # transformers 5.19
    return None if is_told or not window or window >= (positions or math.inf) else window


def refuse_to_pack(hf_model: Any) -> None:
    """Layers with a state, such as linear attention, see whatever lies before a token in the row; models that count
    positions by themselves count on from one sequence to the next; some have attention of their own."""
    if "position_ids" not in inspect.signature(hf_model.base_model.forward).parameters:
        raise ModelError(
            f"{type(hf_model).__name__} takes no position ids, and in a row of packed sequences would count on from "
            "one to the next; set use_remove_padding=False for this model."
        )
    kinds = set(getattr(hf_model.config.get_text_config(), "layer_types", None) or ())
    other = sorted(kinds - {"full_attention", "sliding_attention"})
    if other or hf_model._is_stateful:
        raise ModelError(
            f"{type(hf_model).__name__} has {', '.join(other) or 'recurrent'} layers, in which packed sequences would "
            "mix; set use_remove_padding=False for this model."
        )
    if window := window_in_mask_only(hf_model.config.get_text_config()):
        raise ModelError(
            f"{type(hf_model).__name__} puts its sliding_window={window} into the mask alone, which packed attention "
            "does not read; set use_remove_padding=False for this model."
        )
    if not hf_model._can_set_attn_implementation():
        raise ModelError(
            f"{type(hf_model).__name__} computes attention with code of its own, in which packed sequences would mix; "
            "set use_remove_padding=False for this model."
        )


def refuse_attention_that_cannot_be_packed(hf_model: Any) -> None:
    """Run the layers without numbers: `packed_attention` refuses what it is asked for and does not compute.

    For a model on the meta device, before a process is started.
    """
    hf_model.set_attn_implementation(register_packed_attention())
    rows = torch.ones(2, 4, dtype=torch.long)
    batch = pack_batch(rows, rows)
    try:
        hf_model.base_model(
            input_ids=batch.input_ids.to("meta"),
            attention_mask=no_mask().to("meta"),
            position_ids=batch.position_ids.to("meta"),
            use_cache=False,
            segments=batch.segments,
        )
    except PackingError:
        raise
    except Exception as error:  # noqa: BLE001  without numbers a router, say, cannot go on; attention came before it
        logger.debug("%s ends without numbers: %s", type(hf_model).__name__, error)


_NO_PADDING = {
    "cpmant": "adds a prompt of its own to every row",
    "mllama": "needs a mask of images for every token",
    "rwkv": "takes padding for tokens",
    "xlstm": "takes padding for tokens",
    "xlnet": "lets tokens attend to later ones",
}


def refuse_other_backbones(hf_model: Any) -> None:
    """What does not compute hidden states of causal, padded rows."""
    if hf_model.config.is_encoder_decoder:
        raise ModelError(f"{type(hf_model).__name__} has an encoder beside its decoder; give a decoder-only model.")
    if hf_model.base_model is hf_model and hf_model.get_output_embeddings() is not None:
        raise ModelError(
            f"{type(hf_model).__name__} does not say which of its parts computes hidden states (base_model_prefix="
            f"{hf_model.base_model_prefix!r} names none of them); use another model."
        )
    if (reason := _NO_PADDING.get(hf_model.config.model_type)) is not None:
        raise ModelError(
            f"{type(hf_model).__name__} {reason}, which dovetail's batches do not allow; use another model."
        )


def refuse_bidirectional(hf_model: Any) -> None:
    """PaliGemma's prompts attend to later tokens. Without a mask that says which they are, responses do too, and packed
    rows see each other."""
    if getattr(hf_model.config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):
        raise ModelError(
            f"{type(hf_model).__name__} lets tokens attend to later ones (use_bidirectional_attention), and dovetail "
            "computes causal attention only; use another model."
        )


def refuse_layers_before_the_head(hf_model: Any) -> None:
    """`PolicyModel` computes logits from the backbone's states; what a model puts in between, as BERT does, is not."""
    head = hf_model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(hf_model).__name__} has no output layer that writes tokens; give a language model.")
    around = next((part for part in hf_model.modules() if any(inner is head for inner in part.children())), head)
    for part in (around, getattr(hf_model, "lm_head", head)):
        others = {id(parameter) for parameter in part.parameters()} - {id(parameter) for parameter in head.parameters()}
        if others and not isinstance(part, PreTrainedModel):
            raise ModelError(
                f"{type(hf_model).__name__} has layers between its states and its output layer "
                f"({type(part).__name__}), which dovetail does not compute; use a model without."
            )


def checked_layer(layer: nn.Module) -> nn.Module:
    if isinstance(getattr(layer, "weight", None), DTensor):
        raise RuntimeError(
            "the output layer's weight is still sharded inside forward: it was given an FSDP unit of its own. "
            "Shard the transformer layers and the wrapper (root) only, so that the root gathers it."
        )
    return layer


def predicting_positions(attention_mask: Tensor, token_mask: Tensor | None) -> Tensor:
    """`[B, T]`: positions whose hidden state predicts a wanted token (its neighbour to the right)."""
    mask = attention_mask.bool()
    wanted = mask if token_mask is None else mask & token_mask.bool()
    return torch.cat([wanted[:, 1:] & mask[:, :-1], torch.zeros_like(mask[:, :1])], dim=1)


def concat_multi_modal_inputs(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the image columns of rows (`pixel_values`, `image_grid_thw`, ...) along their first axis, in row order.

    A processor's `mm_token_type_ids` have the length of a prompt, not of its images, and are left out.
    """
    names = {name: None for row in rows for name in row if name != TOKEN_TYPES}
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
        tokens = "input_ids" if kwargs.get("inputs_embeds") is None else "inputs_embeds"  # OPT's embeds for itself
        kwargs[tokens] = slice_inputs(kwargs[tokens], 1, group)
        kwargs["position_ids"] = slice_inputs(positions, positions.dim() - 1, group)
        return args, kwargs

    handle = decoder.register_forward_pre_hook(cut, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
