"""How a backend talks to a network: columns of a micro-batch in, results per token out.

Branches once, on the kind of network, when a backend is built. What the network is called with is made from the
micro-batch on the host, and then sent: the host never waits for the device here. Knows no sharding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.backends.base import ForwardOptions, TokenOutput
from dovetail.models.backbone import concat_multi_modal_inputs
from dovetail.models.head import TokenLists
from dovetail.models.multimodal import TOKEN_TYPES, prompt_token_types
from dovetail.models.policy import PolicyModel
from dovetail.models.transfer import to_device
from dovetail.models.value import RewardModel, ValueModel
from dovetail.models.vocabulary_divergence import Teacher
from dovetail.protocol import DataProto
from dovetail.protocol.routed_experts import ROUTED_EXPERTS
from dovetail.protocol.sampling_mask import NOT_KEPT, SAMPLING_MASK, padded_sets

NetworkCall = Callable[[nn.Module, DataProto, DataProto, ForwardOptions], TokenOutput]
"""``call(module, micro_batch, on_device, options)``: the micro-batch on the host, and its copy on the device.
``module`` is the network after sharding, which may be another object."""


def network_call(network: nn.Module) -> NetworkCall:
    """The way to call this kind of network."""
    for kind, call in _CALLS.items():
        if isinstance(network, kind):
            return call
    known = ", ".join(kind.__name__ for kind in _CALLS)
    raise TypeError(f"a backend trains {known}, not {type(network).__name__}; wrap the model in one of them")


def _call_policy(
    module: nn.Module, micro_batch: DataProto, on_device: DataProto, options: ForwardOptions
) -> TokenOutput:
    out = module(
        **_inputs(module, micro_batch, on_device, wanted_tokens(micro_batch, options)),
        temperature=options.temperature,
        need_entropy=options.entropy,
        need_best=options.best,
        need_sum_squares=options.sum_squares,
        lists=token_lists(on_device, options),
        need_hidden=options.hidden,
        teacher=teacher_of(on_device, options),
        kept_ids=to_device(kept_ids(micro_batch), on_device.tensors["input_ids"].device),
        record_experts=options.record_experts,
    )
    top_ids, top_log_probs = (None, None) if out.top is None else out.top
    return TokenOutput(
        log_probs=out.log_probs,
        entropy=out.entropy,
        best=out.best,
        sum_squares=out.sum_squares,
        top_ids=top_ids,
        top_log_probs=top_log_probs,
        listed=out.listed,
        overlap=out.overlap,
        hidden=out.hidden,
        divergence=out.divergence,
        routed_experts=out.routed_experts,
        routing_changed=out.routing_changed,
    )


def token_lists(micro_batch: DataProto, options: ForwardOptions) -> TokenLists | None:
    """The tokens beside the sampled ones whose log-probs are asked for."""
    if not options.top_k and not options.listed:
        return None
    ids = None
    if options.listed:
        ids = _at_tokens(micro_batch, "teacher_top_ids")
    return TokenLists(options.top_k, options.top_vocab_size, ids)


def teacher_of(micro_batch: DataProto, options: ForwardOptions) -> Teacher | None:
    """The teacher that is asked for, with the hidden states of this micro-batch."""
    if options.teacher is None:
        return None
    return replace(options.teacher, hidden=_at_tokens(micro_batch, "teacher_hidden"))


def kept_ids(micro_batch: DataProto) -> Tensor | None:
    """`[rows, seq_len, k]`: what each token was sampled from, where the rows have sampling masks."""
    if SAMPLING_MASK not in micro_batch:
        return None
    width, length = micro_batch.tensors["responses"].size(1), micro_batch.tensors["input_ids"].size(1)
    sets = padded_sets(list(micro_batch.non_tensor_batch[SAMPLING_MASK]), width)
    return nn.functional.pad(sets, (0, 0, length - width, 0), value=NOT_KEPT)


def _at_tokens(micro_batch: DataProto, name: str) -> Tensor:
    """A column of the responses, `[rows, response_len, k]`, with zeros before it for the prompt."""
    of_responses = micro_batch.tensors[name]
    prompt = micro_batch.tensors["input_ids"].size(1) - of_responses.size(1)
    return nn.functional.pad(of_responses, (0, 0, prompt, 0))


def _call_value(
    module: nn.Module, micro_batch: DataProto, on_device: DataProto, options: ForwardOptions
) -> TokenOutput:
    return TokenOutput(values=module(**_inputs(module, micro_batch, on_device)))


def _call_reward(
    module: nn.Module, micro_batch: DataProto, on_device: DataProto, options: ForwardOptions
) -> TokenOutput:
    return TokenOutput(scores=module(**_inputs(module, micro_batch, on_device)))


_CALLS: dict[type[nn.Module], NetworkCall] = {
    PolicyModel: _call_policy,
    ValueModel: _call_value,
    RewardModel: _call_reward,
}


def _inputs(
    module: Any, micro_batch: DataProto, on_device: DataProto, token_mask: Tensor | None = None
) -> dict[str, Any]:
    tensors, media = micro_batch.tensors, None
    if "multi_modal_inputs" in micro_batch.non_tensor_batch:
        media = _media(module.hf_model.config, micro_batch)
    batch = module.prepare(
        tensors["input_ids"],
        tensors["attention_mask"],
        tensors.get("position_ids"),
        token_mask=token_mask,
        multi_modal_inputs=media,
        routed_experts=micro_batch.non_tensor_batch.get(ROUTED_EXPERTS),
    )
    if media is not None:
        types = media.pop(TOKEN_TYPES, None)  # of the padded shape, and `prepare` has used them
        if types is not None and module.image_mask_keyword is not None:
            media[module.image_mask_keyword] = types
    device = on_device.tensors["input_ids"].device
    return {"batch": to_device(batch, device), "multi_modal_inputs": to_device(media, device)}


def _media(config: Any, micro_batch: DataProto) -> dict[str, Tensor]:
    """The images of all rows end to end, and which tokens stand for them; empty when no row has any."""
    tensors, rows = micro_batch.tensors, list(micro_batch.non_tensor_batch["multi_modal_inputs"])
    joined = concat_multi_modal_inputs(rows)
    if not joined:
        return {}
    if not hasattr(config, "vision_config"):
        raise ValueError(
            f"prompts come with images ({', '.join(joined)}), and model_type={config.model_type} reads token ids only; "
            "every role of a run with images needs a model that sees them."
        )
    input_ids = tensors["input_ids"]
    num_written = tensors["responses"].size(1) if "responses" in tensors else 0
    types = prompt_token_types(config, input_ids, rows, num_written=num_written)
    return {TOKEN_TYPES: types, **joined}


def wanted_tokens(micro_batch: DataProto, options: ForwardOptions) -> Tensor | None:
    """A mask of the tokens whose log-probs are asked for; None for all of them."""
    if options.only_column is not None:
        return micro_batch.tensors[options.only_column]
    attention_mask, count = micro_batch.tensors["attention_mask"], options.last_tokens
    if count is None:
        return None
    places = torch.arange(attention_mask.size(1), device=attention_mask.device)
    return (places >= attention_mask.size(1) - count).expand_as(attention_mask)
