"""Tiny models of every family that Megatron builds here, and Megatron models of them on any layout, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from dovetail.config.megatron import MegatronConfig
from dovetail.config.optim import OptimConfig

VOCAB_SIZE = 101  # a prime: Megatron pads it on every layout
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_mtp_layers": 0,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "llama3": lambda: LlamaConfig(**_SIZES | {"tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "llama_linear": lambda: LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "qwen2": lambda: Qwen2Config(**_SIZES | {"tie_word_embeddings": True}),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16),
    "qwen3_yarn": lambda: Qwen3Config(**_SIZES, head_dim=16, rope_parameters=_YARN),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SIZES, **_EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_moe_plain": lambda: Qwen3MoeConfig(**_SIZES, **_EXPERTS, norm_topk_prob=False),
    "deepseek_v3": lambda: DeepseekV3Config(**_SIZES | _LATENT),
    "deepseek_v3_yarn": lambda: DeepseekV3Config(
        **_SIZES | _LATENT | {"q_lora_rank": None},
        rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1},
    ),
}


def hf_model(name: str, *, seed: int = 0, config: Any = None) -> Any:
    """In float32, with weights large enough that every part matters: norms, biases and routers too."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]() if config is None else config, attn_implementation="eager")
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "norm" in key:
                tensor.add_(torch.randn_like(tensor) * 0.1)
            elif "correction_bias" in key:
                tensor.normal_(0, 0.1)
            else:
                tensor.normal_(0, 0.3 if ".gate.weight" in key else 0.1)
    return model.eval()


def save_folder(name: str, folder: Path, **options: Any) -> Any:
    """The model written as a Hugging Face folder, and returned."""
    model = hf_model(name, **options)
    model.save_pretrained(folder)
    return model


def megatron_backend(
    folder: Path,
    *,
    role: str = "policy",
    optim: OptimConfig | None = None,
    dtype: str = "float32",
    override: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **sizes: int,
) -> Any:
    """The `MegatronBackend` of a folder on a layout of its own: groups of an earlier one are given up."""
    from dovetail.backends.megatron.build import build_megatron_backend
    from dovetail.models.load import load_config

    forget_layout()
    config = megatron_config(dtype=dtype, override=override, more=more, **sizes)
    return build_megatron_backend(
        load_config(folder),
        role,  # pyrefly: ignore[bad-argument-type]
        weights=folder,
        megatron=config,
        optim=optim,
    )


def forget_layout() -> None:
    """Give up the groups of a layout. Megatron only drops its references, and each group has threads of its own."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    from tests.megatron_groups import destroy_layout

    destroy_layout()
    for group in list(_world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def megatron_model(folder: Path, **options: Any) -> Any:
    """The `MegatronModel` in it."""
    return megatron_backend(folder, **options).model


def megatron_config(
    *, dtype: str = "float32", override: dict[str, Any] | None = None, more: dict[str, Any] | None = None, **sizes: int
) -> MegatronConfig:
    """`tp=2, pp=2, vpp=2, cp=2, ep=2, etp=1` in short."""
    return MegatronConfig(
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        virtual_pipeline_model_parallel_size=sizes.get("vpp"),
        context_parallel_size=sizes.get("cp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=sizes.get("etp"),
        dtype=dtype,  # pyrefly: ignore[bad-argument-type]
        override_transformer_config=override or {},
        **(more or {}),
    )
