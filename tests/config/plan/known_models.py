"""The sizes of public models as their `config.json` files state them, with the totals their authors publish."""

from __future__ import annotations

from typing import Any


def dense(
    model_type: str,
    hidden: int,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    tied: bool,
    **extra: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **extra,
    }


QWEN2_5_0_5B = dense("qwen2", 896, 4864, 24, 14, 2, 151936, True, max_position_embeddings=32768)
QWEN2_5_1_5B = dense("qwen2", 1536, 8960, 28, 12, 2, 151936, True, max_position_embeddings=131072)
QWEN2_5_7B = dense("qwen2", 3584, 18944, 28, 28, 4, 152064, False, max_position_embeddings=131072)
QWEN2_5_32B = dense("qwen2", 5120, 27648, 64, 40, 8, 152064, False, max_position_embeddings=131072)
LLAMA_3_8B = dense("llama", 4096, 14336, 32, 32, 8, 128256, False, max_position_embeddings=8192)
SMOLLM2_135M = dense("llama", 576, 1536, 30, 9, 3, 49152, True, max_position_embeddings=8192)
MISTRAL_7B = dense("mistral", 4096, 14336, 32, 32, 8, 32000, False, max_position_embeddings=32768)
MIXTRAL_8X7B = dense("mixtral", 4096, 14336, 32, 32, 8, 32000, False, num_local_experts=8, num_experts_per_tok=2)
GEMMA_2_2B = dense("gemma2", 2304, 9216, 26, 8, 4, 256000, True, head_dim=256)
QWEN3_8B = dense("qwen3", 4096, 12288, 36, 32, 8, 151936, False, head_dim=128)
QWEN3_30B_A3B = dense(
    "qwen3_moe",
    2048,
    6144,
    48,
    32,
    4,
    151936,
    False,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    max_position_embeddings=40960,
)
DEEPSEEK_V3 = dense(
    "deepseek_v3",
    7168,
    18432,
    61,
    128,
    128,
    129280,
    False,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    first_k_dense_replace=3,
    moe_layer_freq=1,
    max_position_embeddings=163840,
    rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
)
QWEN2_5_VL_7B = dense(
    "qwen2_5_vl",
    3584,
    18944,
    28,
    28,
    4,
    152064,
    False,
    max_position_embeddings=128000,
    rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
    vision_config={
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
)

# Exact totals, as published; DeepSeek-V3 without its multi-token-prediction layer and routing-bias buffers.
TOTALS: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-0.5B": (QWEN2_5_0_5B, 494_032_768),
    "Qwen2.5-1.5B": (QWEN2_5_1_5B, 1_543_714_304),
    "Qwen2.5-7B": (QWEN2_5_7B, 7_615_616_512),
    "Qwen2.5-32B": (QWEN2_5_32B, 32_763_876_352),
    "Llama-3-8B": (LLAMA_3_8B, 8_030_261_248),
    "SmolLM2-135M": (SMOLLM2_135M, 134_515_008),
    "Mistral-7B": (MISTRAL_7B, 7_241_732_096),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46_702_792_704),
    "Gemma-2-2B": (GEMMA_2_2B, 2_614_341_888),
    "Qwen3-8B": (QWEN3_8B, 8_190_735_360),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
    "Qwen2.5-VL-7B": (QWEN2_5_VL_7B, 8_292_166_656),
    "DeepSeek-V3": (DEEPSEEK_V3, 671_026_404_352),
}
