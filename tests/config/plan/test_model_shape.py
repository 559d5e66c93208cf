"""Counts from config.json against published totals and against the models transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.plan.model_shape import ModelShapeError, read_model_shape, shape_from_config
from tests.config.plan import known_models as known

pytestmark = pytest.mark.unit

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "head_dim": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
SHARED = {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
LATENT = {**SHARED, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2_moe", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 80, "mlp_only_layers": [1]}),
    ("qwen3", {}),
    ("qwen3_moe", {**EXPERTS, "num_experts": 8, "decoder_sparse_step": 2}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 32, "n_group": 2, "topk_group": 1}),
    ("gemma", {}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("phi3", {}),
    ("phi", {}),
    ("starcoder2", {}),
    ("olmo2", {}),
    ("glm4", {}),
    ("glm4_moe", {**SHARED, "n_group": 1, "topk_group": 1, "use_qk_norm": True}),
    ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("granite", {}),
    ("smollm3", {}),
]


@pytest.mark.parametrize("name", known.TOTALS)
def test_the_total_equals_the_published_parameter_count(name: str) -> None:
    config, total = known.TOTALS[name]
    assert shape_from_config(config).parameters == total


@pytest.mark.parametrize(("model_type", "extra"), VARIANTS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_count_equals_that_of_the_model_transformers_builds(model_type: str, extra: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SMALL, **extra})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    # Both what save_pretrained writes (differences to the defaults) and the full dictionary.
    for content in (config.to_diff_dict(), config.to_dict()):
        assert shape_from_config(json.loads(json.dumps(content, default=str))).parameters == expected


@pytest.mark.parametrize(
    ("model_type", "vision"),
    [
        ("qwen2_vl", {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}),
        (
            "qwen2_5_vl",
            {"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 64},
        ),
    ],
)
def test_a_vision_model_counts_text_and_tower(model_type: str, vision: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {key: value for key, value in SMALL.items() if key != "head_dim"}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    shape = shape_from_config(json.loads(json.dumps(config.to_dict(), default=str)))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.vision > 0


def test_active_parameters_are_those_of_the_chosen_experts() -> None:
    assert shape_from_config(known.QWEN3_30B_A3B).active_parameters == pytest.approx(3.35e9, rel=0.01)
    assert shape_from_config(known.DEEPSEEK_V3).active_parameters == pytest.approx(37.5e9, rel=0.01)
    assert shape_from_config(known.MIXTRAL_8X7B).active_parameters == pytest.approx(12.9e9, rel=0.01)
    dense = shape_from_config(known.LLAMA_3_8B)
    assert dense.active_parameters == dense.parameters


def test_latent_attention_caches_one_compressed_vector() -> None:
    assert shape_from_config(known.DEEPSEEK_V3).kv_bytes_per_token == 61 * (512 + 64) * 2
    assert shape_from_config(known.LLAMA_3_8B).kv_bytes_per_token == 32 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"type": "linear", "factor": 2.0}, 65536),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "default", "rope_theta": 1e6}, 32768),
    ],
)
def test_context_length_follows_the_rope_scaling(scaling: dict[str, Any] | None, expected: int) -> None:
    assert shape_from_config({**known.QWEN2_5_0_5B, "rope_scaling": scaling}).context_length == expected


def test_an_unknown_family_is_counted_like_llama_and_says_so() -> None:
    shape = shape_from_config({**known.LLAMA_3_8B, "model_type": "brand_new"})
    assert shape.parameters == 8_030_261_248
    assert "brand_new" in shape.notices[0]


def test_a_config_that_is_not_a_language_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelShapeError, match="hidden_size"):
        shape_from_config({"model_type": "resnet"})
    with pytest.raises(ModelShapeError, match=r"config\.json"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{oops")
    with pytest.raises(ModelShapeError, match="not valid JSON"):
        read_model_shape(tmp_path)
