"""The built-in families; importing this module registers them."""

from __future__ import annotations

from dovetail.backends.megatron.families.base import register_family
from dovetail.backends.megatron.families.deepseek_v3 import DeepseekV3Family
from dovetail.backends.megatron.families.llama import LlamaFamily
from dovetail.backends.megatron.families.qwen2 import Qwen2Family
from dovetail.backends.megatron.families.qwen3 import Qwen3Family
from dovetail.backends.megatron.families.qwen3_moe import Qwen3MoeFamily

for _family in (LlamaFamily(), Qwen2Family(), Qwen3Family(), Qwen3MoeFamily(), DeepseekV3Family()):
    register_family(_family)
