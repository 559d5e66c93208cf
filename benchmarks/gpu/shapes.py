"""Shapes of Qwen2.5 models, as configurations for random weights. Loads and saves nothing."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2Config

# hidden size, intermediate size, layers, heads, KV heads
SHAPES = {"0.5B": (896, 4864, 24, 14, 2), "1.5B": (1536, 8960, 28, 12, 2), "7B": (3584, 18944, 28, 28, 4)}
TINY = (64, 128, 2, 4, 2)
VOCABULARY = 151_936


def qwen2_config(shape: str, *, max_position_embeddings: int = 4096, **others: Any) -> Qwen2Config:
    """One of `SHAPES`, or "tiny"."""
    hidden, intermediate, layers, heads, kv_heads = TINY if shape == "tiny" else SHAPES[shape]
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=max_position_embeddings,
        **others,
    )
