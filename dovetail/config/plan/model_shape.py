"""Parameter counts, heads, cache size and context of a model, from its Hugging Face `config.json` alone.

Loads neither torch nor transformers and never looks at weight files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.config.hub import HubError, fetch_file, is_hub_name
from dovetail.config.plan.families import TEXT_OF, Family, Switch, family_of, vision_parameters
from dovetail.config.root import DovetailConfig
from dovetail.config.tree import merge

Raw = dict[str, Any]


class ModelShapeError(ValueError):
    """A `config.json` that is missing, unreadable, or lacks a size that nothing can be counted without."""


@dataclass(frozen=True)
class LayerShape:
    """Parameters of one decoder layer, by part."""

    attention: int
    norms: int
    mlp: int = 0
    router: int = 0
    shared_experts: int = 0
    routed_experts: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.routed_experts

    @property
    def dense(self) -> int:
        """All but the routed experts: what expert parallelism does not split."""
        return self.attention + self.norms + self.mlp + self.router + self.shared_experts

    @property
    def is_moe(self) -> bool:
        return self.routed_experts > 0


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
        return sum(self.parts.values())

    @property
    def active_parameters(self) -> int:
        """Parameters one token passes through: all but the experts it is not routed to."""
        routed = sum(layer.routed_experts for layer in self.layers)
        if not routed:
            return self.parameters
        return self.parameters - routed + routed * self.experts_per_token // self.num_experts

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache of one token over all layers, two bytes per value, sliding windows not subtracted."""
        return 2 * self.num_layers * (self.latent_cache_width or 2 * self.num_kv_heads * self.head_dim)

    @property
    def parts(self) -> dict[str, int]:
        """Parameters by part of the model."""
        layers = ("attention", "mlp", "router", "shared_experts", "routed_experts", "norms")
        sums = {part: sum(getattr(layer, part) for layer in self.layers) for part in layers}
        sums["norms"] += self.final_norm
        return {"embedding": self.embedding, **sums, "head": self.head, "vision": self.vision}


@dataclass(frozen=True)
class Shapes:
    """Shapes by network; None where the run has no such network or its config.json is not here."""

    policy: ModelShape | None = None
    critic: ModelShape | None = None
    reward: ModelShape | None = None
    teacher: ModelShape | None = None
    """Of distillation, where it is the reference; the largest of several."""
    other_teachers: tuple[ModelShape, ...] = ()
    notices: tuple[str, ...] = ()


def read_shapes(config: DovetailConfig) -> Shapes:
    """Read every `config.json` that the roles of this run need. A missing one costs a notice, never the plan."""
    model, critic, reward = config.actor_rollout_ref.model, config.critic.model, config.reward_model
    notices: list[str] = []

    def read(key: str, folder: str, changes: Raw) -> ModelShape | None:
        if not folder:
            return None  # the checks ask for it
        try:
            shape = read_model_shape(folder, changes)
        except ModelShapeError as error:
            notices.append(f"{key}={folder}: {error} The plan has no memory part for this network.")
            return None
        notices.extend(f"{key}={folder}: {text}" for text in shape.notices)
        return shape

    policy = read("actor_rollout_ref.model.path", model.config_path, model.override_config)
    value = score = None
    if config.uses_critic:
        same = critic.config_path == model.config_path and critic.override_config == model.override_config
        value = policy if same else read("critic.model.path", critic.config_path, critic.override_config)
    if reward.enable and reward.model.path:
        score = read("reward_model.model.path", reward.model.path, reward.model.override_config)
    teachers: list[ModelShape] = []
    for name, reference in config.reference_models.items() if config.distills else ():
        key = f"distill.teachers.{name}" if name else "distill.teacher.path"
        if (shape := read(key, reference.path, reference.override_config)) is not None:
            teachers.append(shape)
    teachers.sort(key=lambda shape: shape.parameters, reverse=True)
    return Shapes(policy, value, score, teachers[0] if teachers else None, tuple(teachers[1:]), tuple(notices))


def read_model_shape(folder: str | Path, changes: Raw | None = None) -> ModelShape:
    """The shape of the model in `folder` (or of the `config.json` given directly), with `changes` to its config."""
    raw = read_config_json(folder)
    merge(raw, changes or {})
    return shape_from_config(raw)


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
    top, text = str(config.get("model_type", "")), config.get("text_config")
    model_type = TEXT_OF.get(top, top)
    if isinstance(text, dict):
        model_type = str(text.get("model_type") or model_type)
    decoder = _Decoder(text if isinstance(text, dict) else config, family_of(model_type))
    text, family, hidden = decoder.text, decoder.family, decoder.hidden
    vocab = decoder.size("vocab_size")
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", family.tied)))
    guess = f"model_type={model_type!r} is not in the table; counted like a Llama model."
    return ModelShape(
        model_type=str(config.get("model_type", model_type)),
        hidden_size=hidden,
        num_heads=decoder.heads,
        num_kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        vocab_size=vocab,
        context_length=_context_length(text),
        embedding=vocab * hidden,
        head=(0 if tied else vocab * hidden) + (vocab if family.head_bias else 0),
        final_norm=hidden * (2 if family.norm_bias else 1),
        layers=tuple(decoder.layer(index) for index in range(decoder.size("num_hidden_layers", "n_layer"))),
        tied=tied,
        intermediate_size=decoder.dense_width,
        expert_intermediate_size=decoder.expert_width,
        shared_intermediate_size=decoder.shared_width,
        num_experts=decoder.num_experts,
        experts_per_token=decoder.first("num_experts_per_tok", "experts_per_token") or 1 if decoder.num_experts else 0,
        latent_cache_width=text["kv_lora_rank"] + text["qk_rope_head_dim"] if decoder.is_latent else None,
        attention_width=decoder.attention_width,
        qk_norm_width=0
        if decoder.is_latent or family.qk_norm == "none"
        else (decoder.heads + decoder.kv_heads) * decoder.head_dim,
        gated_mlp=family.gated_mlp,
        vision=vision_parameters(config, hidden),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"),
        notices=() if family.known else (guess,),
    )


class _Decoder:
    """Counts the parameters of the layers that a config describes, under the several names families give to sizes."""

    def __init__(self, text: Raw, family: Family) -> None:
        self.text, self.family = text, family
        self.hidden = self.size("hidden_size", "n_embd", "d_model")
        self.heads = self.size("num_attention_heads", "n_head")
        self.kv_heads = self.first("num_key_value_heads") or self.heads
        self.head_dim = self.first("head_dim") or family.head_dim or self.hidden // self.heads
        # Attention that compresses keys and values (DeepSeek's MLA).
        self.is_latent = family.latent_attention or "kv_lora_rank" in text
        self.num_experts = self.first("n_routed_experts", "num_experts", "num_local_experts")
        self.expert_width = self.first("moe_intermediate_size", "intermediate_size") if self.num_experts else 0
        shared = self.first("shared_expert_intermediate_size") or self.first("n_shared_experts") * self.expert_width
        self.shared_width = shared if self.num_experts else 0
        width = self.first("intermediate_size", "n_inner", "ffn_dim")
        self.dense_width = width or self.expert_width or 4 * self.hidden

    def first(self, *names: str) -> int:
        """The first of `names` that the config states, else 0."""
        return next((int(self.text[name]) for name in names if self.text.get(name)), 0)

    def size(self, *names: str) -> int:
        """The same for a size that nothing can be counted without."""
        if not (size := self.first(*names)):
            raise ModelShapeError(f"config.json has no {names[0]}; it does not describe a decoder-only language model.")
        return size

    def layer(self, index: int) -> LayerShape:
        """Parameters of one layer, dense or mixture as the config says."""
        hidden, family = self.hidden, self.family
        attention, qk_norms = self._latent_attention() if self.is_latent else self._grouped_attention()
        norms = family.norms_per_layer * hidden * (2 if family.norm_bias else 1) + qk_norms
        if not self._has_experts(index):
            bias = self._on(family.mlp_bias)
            return LayerShape(attention, norms, mlp=_mlp(hidden, self.dense_width, family.gated_mlp, bias))
        gate = hidden if family.shared_expert_gate else 0
        return LayerShape(
            attention,
            norms,
            router=self.num_experts * (hidden + (1 if family.router_bias else 0)),
            shared_experts=_mlp(hidden, self.shared_width, True, False) + gate if self.shared_width else 0,
            routed_experts=self.num_experts * _mlp(hidden, self.expert_width, True, family.expert_bias),
        )

    @property
    def attention_width(self) -> int:
        """Two-byte values per token that the backward pass of attention keeps: queries, keys, values, output."""
        if not self.is_latent:
            return 2 * (self.heads + self.kv_heads) * self.head_dim
        text = self.text
        query = self.heads * (text["qk_nope_head_dim"] + text["qk_rope_head_dim"])
        ranks = (text.get("q_lora_rank") or 0) + text["kv_lora_rank"]
        return 2 * query + 2 * self.heads * text["v_head_dim"] + ranks

    def _has_experts(self, index: int) -> bool:
        if not self.num_experts or index < self.first("first_k_dense_replace"):
            return False
        every = self.first("decoder_sparse_step", "moe_layer_freq") or 1
        return index not in (self.text.get("mlp_only_layers") or ()) and (index + 1) % every == 0

    def _on(self, switch: Switch) -> bool:
        return switch if isinstance(switch, bool) else bool(self.text.get(switch[0], switch[1]))

    def _grouped_attention(self) -> tuple[int, int]:
        """Parameters, and those of the norms on queries and keys."""
        family, hidden = self.family, self.hidden
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = hidden * (q + 2 * kv) + q * hidden
        weights += (q + 2 * kv) if self._on(family.qkv_bias) else 0
        weights += hidden if self._on(family.out_bias) else 0
        weights += self.heads if family.attention_sinks else 0
        if family.qk_norm == "none" or (family.qk_norm_key and not self.text.get(family.qk_norm_key, False)):
            return weights, 0
        return weights, 2 * self.head_dim if family.qk_norm == "head" else q + kv

    def _latent_attention(self) -> tuple[int, int]:
        hidden, heads = self.hidden, self.heads
        nope, rope = self.size("qk_nope_head_dim"), self.size("qk_rope_head_dim")
        value, kv_rank, q_rank = self.size("v_head_dim"), self.size("kv_lora_rank"), self.first("q_lora_rank")
        query = heads * (nope + rope)
        weights = hidden * q_rank + q_rank * query if q_rank else hidden * query
        weights += hidden * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * hidden
        weights += q_rank + kv_rank + rope + hidden if self._on(self.family.qkv_bias) else 0
        return weights, q_rank + kv_rank


def _mlp(hidden: int, width: int, gated: bool, bias: bool) -> int:
    ups = 2 if gated else 1
    return (ups + 1) * hidden * width + ((ups * width + hidden) if bias else 0)


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
