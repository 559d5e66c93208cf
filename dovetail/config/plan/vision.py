"""Parameters of the vision tower that a multimodal `config.json` describes. Exact for Qwen2-VL and Qwen2.5-VL."""

from __future__ import annotations

from typing import Any

Raw = dict[str, Any]


def vision_parameters(config: Raw, text_hidden: int) -> int:
    """Parameters of the tower and its projector; 0 for a text-only model."""
    tower = config.get("vision_config")
    if not isinstance(tower, dict):
        return 0
    if config.get("model_type") == "qwen2_vl":
        return _qwen2_vl(tower, text_hidden)
    if config.get("model_type") == "qwen2_5_vl":
        return _qwen2_5_vl(tower, text_hidden)
    return _plain_transformer(tower, text_hidden)


def _qwen2_vl(tower: Raw, text_hidden: int) -> int:
    width = int(tower.get("embed_dim", 1280))
    inner = int(width * tower.get("mlp_ratio", 4))
    norms = 4 * width
    block = norms + _attention(width) + 2 * width * inner + inner + width
    # Here `hidden_size` is the width handed to the language model.
    return _patches(tower, width) + int(tower.get("depth", 32)) * block + _merger(tower, width, text_hidden, 2 * width)


def _qwen2_5_vl(tower: Raw, text_hidden: int) -> int:
    width = int(tower.get("hidden_size", 1280))
    inner = int(tower.get("intermediate_size", 3420))
    block = 2 * width + _attention(width) + 3 * width * inner + 2 * inner + width
    out = int(tower.get("out_hidden_size") or text_hidden)
    return _patches(tower, width) + int(tower.get("depth", 32)) * block + _merger(tower, width, out, width)


def _plain_transformer(tower: Raw, text_hidden: int) -> int:
    """An estimate for other towers: a ViT with biases and one linear projector."""
    width = int(tower.get("hidden_size") or tower.get("embed_dim") or 1024)
    depth = int(tower.get("num_hidden_layers") or tower.get("depth") or 24)
    inner = int(tower.get("intermediate_size") or 4 * width)
    out = int(tower.get("out_hidden_size") or text_hidden)
    block = 4 * width + _attention(width) + 2 * width * inner + inner + width
    return _patches(tower, width) + depth * block + width * out


def _attention(width: int) -> int:
    return 4 * width * width + 4 * width


def _patches(tower: Raw, width: int) -> int:
    patch = int(tower.get("patch_size", 14))
    return int(tower.get("in_channels", 3)) * int(tower.get("temporal_patch_size", 2)) * patch * patch * width


def _merger(tower: Raw, width: int, out: int, norm: int) -> int:
    merged = width * int(tower.get("spatial_merge_size", 2)) ** 2
    return norm + merged * merged + merged + merged * out + out
