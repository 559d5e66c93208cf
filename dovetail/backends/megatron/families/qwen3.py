"""Qwen3, dense: Llama with a norm on every query and key head."""

from __future__ import annotations

from typing import ClassVar

from dovetail.backends.megatron.families.llama import LlamaFamily


class Qwen3Family(LlamaFamily):
    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    qk_norm: ClassVar[bool] = True
