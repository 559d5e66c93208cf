"""Parameter counts, heads, cache size and context of a model, from its Hugging Face `config.json` alone.

Loads neither torch nor transformers and never looks at weight files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.config.hub import HubError, fetch_file, is_hub_name
from dovetail.config.plan.families import TEXT_OF, family_of
from dovetail.config.plan.layer_shape import (
    Experts,
    LayerShape,
    ModelShapeError,
    attention_width,
    count_layer,
    dense_width,
    is_latent,
    qk_norm_width,
    size_of,
)
from dovetail.config.plan.vision import vision_parameters

Raw = dict[str, Any]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only language model (with an optional vision tower)."""

    model_type: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int | None
    embedding: int
    head: int
    final_norm: int
    layers: tuple[LayerShape, ...]
    tied: bool
    # Widths that decide activation sizes.
    intermediate_size: int
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    # Multi-head latent attention caches one compressed vector per token instead of keys and values.
    latent_cache_width: int | None = None
    # Queries, keys, values and output of attention together: what its backward keeps per token and layer.
    attention_width: int = 0
    # Queries and keys together, where a norm is on them.
    qk_norm_width: int = 0
    gated_mlp: bool = True
    vision: int = 0
    dtype: str = "bfloat16"
    # What was guessed, in words for the user.
    notices: tuple[str, ...] = field(default=())

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def parameters(self) -> int:
        """Every stored parameter; tied weights count once."""
        return sum(self.parts().values())

    @property
    def active_parameters(self) -> int:
        """Parameters one token passes through: all but the experts it is not routed to."""
        routed = sum(layer.routed_experts for layer in self.layers)
        if not routed:
            return self.parameters
        return self.parameters - routed + routed * self.experts_per_token // self.num_experts

    @property
    def cache_width(self) -> int:
        """Cached values per token and layer."""
        return self.latent_cache_width or 2 * self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Cache of one token over all layers on an unsharded engine; sliding windows are not subtracted."""
        return self.num_layers * self.cache_width * bytes_per_value

    def parts(self) -> dict[str, int]:
        """Parameters by part of the model."""
        return {
            "embedding": self.embedding,
            "attention": sum(layer.attention for layer in self.layers),
            "mlp": sum(layer.mlp for layer in self.layers),
            "router": sum(layer.router for layer in self.layers),
            "shared_experts": sum(layer.shared_experts for layer in self.layers),
            "routed_experts": sum(layer.routed_experts for layer in self.layers),
            "norms": sum(layer.norms for layer in self.layers) + self.final_norm,
            "head": self.head,
            "vision": self.vision,
        }


def read_model_shape(folder: str | Path) -> ModelShape:
    """The shape of the model in `folder` (or of the `config.json` given directly)."""
    return shape_from_config(read_config_json(folder))


def read_config_json(folder: str | Path) -> Raw:
    """The content of a model's `config.json`; of a name on the hub that file alone is downloaded."""
    path = Path(folder).expanduser()
    path = path if path.suffix == ".json" else path / "config.json"
    try:
        if is_hub_name(folder):
            path = fetch_file(str(folder), "config.json")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except HubError as error:
        raise ModelShapeError(str(error)) from error
    except OSError as error:
        raise ModelShapeError(f"{path} cannot be read ({error.strerror}); give the model's folder.") from error
    except ValueError as error:
        raise ModelShapeError(f"{path} is not valid JSON ({error}); download the model's config.json again.") from error
    if not isinstance(raw, dict):
        raise ModelShapeError(f"{path} holds a {type(raw).__name__}, not an object; is it a model's config.json?")
    return raw


def shape_from_config(config: Raw) -> ModelShape:
    """The shape described by the content of a `config.json`."""
    text, model_type = _language_model(config)
    family = family_of(model_type)
    hidden = size_of(text, "hidden_size", "n_embd", "d_model")
    heads = size_of(text, "num_attention_heads", "n_head")
    num_kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or family.head_dim or hidden // heads)
    vocab = size_of(text, "vocab_size")
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", family.tied)))
    experts = Experts.of(text)
    layers = tuple(
        count_layer(text, family, index, hidden, heads, num_kv_heads, head_dim, experts)
        for index in range(size_of(text, "num_hidden_layers", "n_layer"))
    )
    latent = is_latent(text, family)
    notices = () if family.known else (f"model_type={model_type!r} is not in the table; counted like a Llama model.",)
    return ModelShape(
        model_type=str(config.get("model_type", model_type)),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        context_length=_context_length(text),
        embedding=vocab * hidden,
        head=(0 if tied else vocab * hidden) + (vocab if family.head_bias else 0),
        final_norm=hidden * (2 if family.norm_bias else 1),
        layers=layers,
        tied=tied,
        intermediate_size=dense_width(text, experts),
        expert_intermediate_size=experts.width,
        shared_intermediate_size=experts.shared_width,
        num_experts=experts.count,
        experts_per_token=experts.per_token,
        latent_cache_width=text["kv_lora_rank"] + text["qk_rope_head_dim"] if latent else None,
        attention_width=attention_width(text, family, heads, num_kv_heads, head_dim),
        qk_norm_width=qk_norm_width(text, family, heads, num_kv_heads, head_dim),
        gated_mlp=family.gated_mlp,
        vision=vision_parameters(config, hidden),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"),
        notices=notices,
    )


def _language_model(config: Raw) -> tuple[Raw, str]:
    top = str(config.get("model_type", ""))
    text = config.get("text_config")
    if isinstance(text, dict):
        return text, str(text.get("model_type") or TEXT_OF.get(top, top))
    return config, TEXT_OF.get(top, top)


def _context_length(text: Raw) -> int | None:
    """Longest sequence the position encoding was made for, with the scaling the config asks for."""
    positions = text.get("max_position_embeddings") or text.get("n_positions")
    if not positions:
        return None
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    factor = float(scaling.get("factor") or 1.0)
    if kind == "yarn":
        return int((scaling.get("original_max_position_embeddings") or positions) * factor)
    if kind in ("linear", "dynamic"):
        return int(positions * factor)
    # llama3 and longrope already state the stretched length in max_position_embeddings.
    return int(positions)
