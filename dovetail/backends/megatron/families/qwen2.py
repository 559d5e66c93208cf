"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import ClassVar

from dovetail.backends.megatron.families.llama import LlamaFamily


class Qwen2Family(LlamaFamily):
    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)
    qkv_bias: ClassVar[bool] = True
