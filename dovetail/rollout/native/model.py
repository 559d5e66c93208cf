"""The engine's view of a model: a Hugging Face module that runs on our attention. Writes no weights.

The trainer's module is never touched: a second, empty module of the same class is built on the meta device and given
the trainer's own parameters and buffers. Both then read the same memory, while attention implementation, training mode,
hooks and checkpointing stay the trainer's affair.
"""

from __future__ import annotations

import copy
import inspect
import logging
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from dovetail.models.backbone import window_in_mask_only
from dovetail.models.load import auto_class, load_config
from dovetail.models.logits import leaves_out_scale
from dovetail.models.longrope import use_one_set
from dovetail.rollout.base import ModelArgs
from dovetail.rollout.native.attention import ATTENTION_NAME

logger = logging.getLogger(__name__)


def load_model(
    folder: str | Path,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    longest_row: int | None = None,
    **args: Unpack[ModelArgs],
) -> PreTrainedModel:
    """Read a model from a folder; `dtype` None keeps what the folder says. `longest_row`: `models.longrope`."""
    with torch.random.fork_rng(devices=[]):
        config = load_config(folder, **args)
        use_one_set(config, longest_row)
        model = auto_class(config).from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            attn_implementation=_attention_of(config),
            trust_remote_code=args.get("trust_remote_code", False),
        )
    _check_supported(model)
    return model.to(device).eval().requires_grad_(False)


def share_model(module: nn.Module, dtype: torch.dtype | None) -> PreTrainedModel:
    """A module of the same class over the same parameters and buffers, with our attention."""
    if not isinstance(module, PreTrainedModel):
        raise TypeError(
            f"the native engine shares the weights of a transformers PreTrainedModel, not of {type(module).__name__}; "
            "unwrap it (merge adapters first), or build the engine from a folder and send weights with update_weights."
        )
    sharded = [name for name, p in module.named_parameters() if isinstance(p, DTensor) or p.is_meta]
    if sharded:
        raise ValueError(
            f"{len(sharded)} parameters are sharded or on the meta device (first: {sharded[0]}); weights can be shared "
            "only when they are whole on the device. Build the engine from a folder and send them with update_weights."
        )
    if dtype not in (None, module.dtype):
        raise ValueError(
            f"dtype={dtype} differs from the shared module's {module.dtype}, and sharing cannot convert; leave dtype "
            "out, or build the engine from a folder and send weights with update_weights."
        )
    replica = empty_model(type(module), module.config)
    replica.generation_config = module.generation_config
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner, leaf = _owner(replica, name)
        owner._parameters[leaf] = parameter
    for name, buffer in module.named_buffers(remove_duplicate=False):
        owner, leaf = _owner(replica, name)
        owner._buffers[leaf] = buffer
    left = [name for name, t in (*replica.named_parameters(), *replica.named_buffers()) if t.is_meta]
    if left:
        raise ValueError(f"{type(module).__name__} has no tensor for {left[0]} ({len(left)} in all) to share.")
    return replica.eval()


def empty_model(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """On the meta device with our attention; NotImplementedError for a model that the engine does not compute."""
    config = copy.deepcopy(config)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = kind._from_config(config, attn_implementation=_attention_of(config))
    _check_supported(model)
    return model


def refuse_unsupported(model: PreTrainedModel) -> None:
    """NotImplementedError if the engine does not compute a model like this one, which is on the meta device.

    Its first layer runs without numbers, because attention says only then what it asks for.
    """
    if not model._can_set_attn_implementation():
        raise NotImplementedError(
            f"model_type={model.config.model_type} has layers that do not take the engine's attention. Use "
            "rollout.name=vllm or sglang for this model."
        )
    replica = empty_model(type(model), model.config)
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        replica.base_model(input_ids=tokens, position_ids=tokens, use_cache=False, kv_step=_FirstStep())
    except NotImplementedError:
        raise
    except Exception as error:  # noqa: BLE001  the first attention ends it; what cannot run without numbers does, too
        logger.debug("%s ends without numbers: %s", type(model).__name__, error)


class _FirstStep:
    """A `KVStep` that ends the model's call: attention has asked for nothing that is not computed."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        raise EOFError(f"layer {layer} attends")


def num_embeddings(model: PreTrainedModel) -> int:
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding), "a causal language model looks its tokens up"
    return embeddings.num_embeddings


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return root.get_submodule(path), leaf


def _attention_of(config: PreTrainedConfig) -> str | dict[str, str]:
    """Our attention where tokens are generated; a vision tower has no cache and keeps torch's."""
    if not hasattr(config, "vision_config"):
        return ATTENTION_NAME
    return {"text_config": ATTENTION_NAME, "vision_config": "sdpa"}


def _check_supported(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    kinds -= {"full_attention", "sliding_attention"}
    other = f"{', '.join(sorted(kinds))} layers" if kinds else ""
    if not other and (unlike := getattr(config, "per_layer_attributes", None)):
        other = f"layers that differ in {', '.join(sorted(unlike))}"
    if not other and (window := window_in_mask_only(config)) is not None:
        other = f"sliding_window={window} in its mask alone"
    # Others compute attention with code of their own, whatever their config says, and would never see the cache.
    is_ours = config._attn_implementation == ATTENTION_NAME and model._can_set_attn_implementation()
    if not other and (model._is_stateful or not is_ours):
        other = "layers that do not take the engine's attention"
    if not other and "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        other = "positions that it counts by itself"
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        other = "attention to later tokens"
    if leaves_out_scale(model):
        raise NotImplementedError(
            f"{type(model).__name__} leaves out logit_scale={config.logit_scale} of its language model, and the native "
            "engine would sample from other probabilities than those it was trained with. Use rollout.name=vllm."
        )
    if other:
        raise NotImplementedError(
            f"model_type={config.model_type} has {other}; the native engine computes causal attention only, in full or "
            "in the sliding windows that layers ask for. Use rollout.name=vllm or sglang for this model."
        )
