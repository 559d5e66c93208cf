"""Check a model folder before a process is started for it: config, architecture, names and shapes of its tensors, and
if asked whether their numbers are finite.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from dovetail.config.adapter import adapter_folder
from dovetail.config.model import ModelConfig
from dovetail.config.wording import name_some
from dovetail.models.backbone import (
    refuse_attention_that_cannot_be_packed,
    refuse_bidirectional,
    refuse_layers_before_the_head,
    refuse_other_backbones,
    refuse_to_pack,
)
from dovetail.models.errors import ModelError
from dovetail.models.load import Role, build_meta_model
from dovetail.models.logits import logit_transform
from dovetail.models.lora import add_adapters
from dovetail.models.prediction_layers import is_prediction_layer
from dovetail.models.weights import lacks_head, load_weights, unread_tensors

# Heads of other roles, and buffers that older releases saved.
_MAY_BE_LEFT_OUT = re.compile(
    r"^(lm_head|score|classifier|v_head)\.|\.(inv_freq|position_ids|masked_bias)$|\.attn\.bias$"
)


def check_model_folder(
    path: str | Path,
    role: Role = "policy",
    *,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    headers_only: bool = True,
    packs: bool = False,
    adapted: ModelConfig | None = None,
) -> PreTrainedModel:
    """The network that `config.json` describes, without memory. ModelError (or FileNotFoundError) if it cannot be read
    from `path`.

    `packs`: also if it would mix sequences that are packed; `adapted`: the section of a network that is trained with
    adapters, also if the model can have none of them, or those of `lora_adapter_path` are not its own.

    Tensors without a place are looked for with the config as the folder has it: whoever overrides the number of layers
    means to leave some out.
    """
    model = build_meta_model(path, role, trust_remote_code=trust_remote_code)
    without_place = unread_tensors(model, path)
    if role == "policy" and (
        heads := [name for name in without_place if name in ("score.weight", "classifier.weight")]
    ):
        raise ModelError(
            f"{path} is a reward model: its weights have a head that scores ({heads[0]}), and the rest of it writes no "
            "text; give a language model, and this folder as reward=."
        )
    unread = [name for name in without_place if not _may_be_left_out(name, model)]
    if unread:
        layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
        raise ModelError(
            f"{path}: {len(unread)} tensors have no place in the network that its config.json describes "
            f"({type(model).__name__} with {layers} layers): {name_some(unread)}. Is the config.json of this model? "
            "To leave layers out on purpose set override_config.num_hidden_layers."
        )
    if role == "reward" and lacks_head(model, path):  # a critic may start with a new head
        raise ModelError(
            f"{path} is no reward model: its weights have no head that scores, and a new one would score at random; "
            "give a sequence classifier, or train one with `dovetail reward` and export it."
        )
    if override_config:
        model = build_meta_model(path, role, override_config=override_config, trust_remote_code=trust_remote_code)
    check_network(model, role, packs=packs)
    adapter = None
    if adapted is not None:
        add_adapters(model, adapted)
        adapter = adapter_folder(adapted)
    load_weights(nn.ModuleDict({"hf_model": model}), path, adapter=adapter, headers_only=headers_only)
    return model


def check_network(model: PreTrainedModel, role: Role = "policy", *, packs: bool = False) -> None:
    """Raise ModelError if a network on the meta device is none that is trained here; needs no weights."""
    refuse_other_backbones(model)
    refuse_bidirectional(model)
    if role == "policy":
        refuse_layers_before_the_head(model)
        logit_transform(model)
    if packs:
        refuse_to_pack(model)
        refuse_attention_that_cannot_be_packed(model)


def _may_be_left_out(name: str, model: PreTrainedModel) -> bool:
    ignored: Iterable[str] = model._keys_to_ignore_on_load_unexpected or ()
    if _MAY_BE_LEFT_OUT.search(name) or any(re.search(pattern, name) for pattern in ignored):
        return True
    return is_prediction_layer(name, model.config)
