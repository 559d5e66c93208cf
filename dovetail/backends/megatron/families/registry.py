"""Families by `model_type` of the Hugging Face configuration: the built-in ones, and those that users register."""

from __future__ import annotations

from typing import Any

from dovetail.backends.megatron.families.base import MegatronFamily
from dovetail.backends.megatron.families.deepseek_v3 import DeepseekV3Family
from dovetail.backends.megatron.families.llama import LlamaFamily, Qwen2Family, Qwen3Family
from dovetail.backends.megatron.families.qwen3_moe import Qwen3MoeFamily

_FAMILIES: dict[str, MegatronFamily] = {}


def register_family(family: MegatronFamily) -> MegatronFamily:
    """Let `family_for` find it. A later registration of the same `model_type` wins."""
    for model_type in family.model_types:
        _FAMILIES[model_type] = family
    return family


def family_for(hf_config: Any) -> MegatronFamily:
    """The family that builds this model; an unknown one is an error that lists those there are."""
    text = hf_config.get_text_config()
    model_type = text.model_type
    if text is not hf_config and model_type in _FAMILIES:
        raise ValueError(
            f"model_type={hf_config.model_type} holds a {model_type} beside a part for images or sound, and models of "
            "text alone are built on Megatron here. Use strategy=fsdp2."
        )
    if model_type not in _FAMILIES:
        raise ValueError(
            f"model_type={model_type} is not built on Megatron here; there are {', '.join(sorted(_FAMILIES))}. Use "
            "strategy=fsdp2, or write a MegatronFamily and pass it to register_family."
        )
    return _FAMILIES[model_type]


for _family in (LlamaFamily(), Qwen2Family(), Qwen3Family(), Qwen3MoeFamily(), DeepseekV3Family()):
    register_family(_family)
