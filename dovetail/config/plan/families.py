"""What the `model_type` of a Hugging Face config fixes and its `config.json` does not say: biases, norms, gating, and
the parameters of vision towers. Reads no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# True / False, or the config key (with its default) that decides.
Switch = bool | tuple[str, bool]


@dataclass(frozen=True)
class Family:
    """Traits of one architecture. The defaults are those of Llama, which most newer models follow."""

    qkv_bias: Switch = ("attention_bias", False)
    out_bias: Switch = ("attention_bias", False)
    mlp_bias: Switch = ("mlp_bias", False)
    gated_mlp: bool = True
    norms_per_layer: int = 2
    norm_bias: bool = False
    # "head": one weight vector per head dimension; "full": over all heads together.
    qk_norm: Literal["none", "head", "full"] = "none"
    qk_norm_key: str | None = None
    latent_attention: bool = False
    tied: bool = False
    head_bias: bool = False
    head_dim: int | None = None
    router_bias: bool = False
    expert_bias: bool = False
    attention_sinks: bool = False
    shared_expert_gate: bool = False
    # Every layer is a mixture when the config names experts, unless a key says otherwise.
    known: bool = True


def _biases(switch: Switch, **traits: Any) -> Family:
    """A family with one switch for the biases of all linear layers."""
    return Family(qkv_bias=switch, out_bias=switch, mlp_bias=switch, **traits)


_QWEN2, _QWEN3 = Family(qkv_bias=True, out_bias=False, mlp_bias=False), Family(qk_norm="head", mlp_bias=False)
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "granite"), Family()),
    "smollm3": Family(tied=True),
    **dict.fromkeys(("mistral", "ministral", "mixtral", "phi3"), _biases(False)),
    **dict.fromkeys(("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"), _QWEN2),
    "qwen2_moe": Family(qkv_bias=("qkv_bias", True), out_bias=False, mlp_bias=False, shared_expert_gate=True),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), _QWEN3),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), Family(latent_attention=True, mlp_bias=False)),
    "gemma": Family(tied=True, head_dim=256, mlp_bias=False),
    "gemma2": Family(tied=True, head_dim=256, norms_per_layer=4, mlp_bias=False),
    "gemma3_text": Family(tied=True, head_dim=256, norms_per_layer=4, qk_norm="head", mlp_bias=False),
    "phi": _biases(True, gated_mlp=False, norms_per_layer=1, norm_bias=True, head_bias=True),
    "starcoder2": _biases(("use_bias", True), gated_mlp=False, norm_bias=True, tied=True),
    "olmo2": Family(qk_norm="full", mlp_bias=False),
    "glm4": Family(out_bias=False, mlp_bias=False, norms_per_layer=4),
    "glm4_moe": Family(out_bias=False, mlp_bias=False, qk_norm="head", qk_norm_key="use_qk_norm"),
    "gpt_oss": _biases(("attention_bias", True), router_bias=True, expert_bias=True, attention_sinks=True),
}

# Top-level types whose language model sits in `text_config`, or, in files written before transformers 4.52, beside it.
TEXT_OF = {name.removesuffix("_text"): name for name in FAMILIES if name.endswith("_text")}


def family_of(model_type: str) -> Family:
    """The traits of `model_type`, or Llama's marked as a guess."""
    return FAMILIES.get(model_type, Family(known=False))


def vision_parameters(config: dict[str, Any], text_hidden: int) -> int:
    """Parameters of the vision tower and its projector, exact for Qwen2-VL and Qwen2.5-VL; 0 for a text-only model."""
    tower = config.get("vision_config")
    if not isinstance(tower, dict):
        return 0
    model_type, out = config.get("model_type"), int(tower.get("out_hidden_size") or text_hidden)
    merged = int(tower.get("spatial_merge_size", 2)) ** 2
    if model_type == "qwen2_vl":
        # Here `hidden_size` is the width handed to the language model.
        width, depth = int(tower.get("embed_dim", 1280)), int(tower.get("depth", 32))
        inner, out = int(width * tower.get("mlp_ratio", 4)), text_hidden
        block = 4 * width + 2 * width * inner + inner + width
        projector = 2 * width + _merger(width * merged, out)
    elif model_type == "qwen2_5_vl":
        width, depth = int(tower.get("hidden_size", 1280)), int(tower.get("depth", 32))
        inner = int(tower.get("intermediate_size", 3420))
        block = 2 * width + 3 * width * inner + 2 * inner + width
        projector = width + _merger(width * merged, out)
    else:  # an estimate: a ViT with biases and one linear projector
        width = int(tower.get("hidden_size") or tower.get("embed_dim") or 1024)
        depth = int(tower.get("num_hidden_layers") or tower.get("depth") or 24)
        inner = int(tower.get("intermediate_size") or 4 * width)
        block = 4 * width + 2 * width * inner + inner + width
        projector = width * out
    attention = 4 * width * width + 4 * width
    patch = int(tower.get("temporal_patch_size", 2)) * int(tower.get("patch_size", 14)) ** 2
    return int(tower.get("in_channels", 3)) * patch * width + depth * (block + attention) + projector


def _merger(merged: int, out: int) -> int:
    return merged * merged + merged + merged * out + out
