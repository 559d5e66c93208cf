"""Models with attention of their own: trained padded, refused packed, and refused altogether where padding is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV32Config,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    GPTJConfig,
    GPTNeoConfig,
    GptOssConfig,
    Llama4TextConfig,
    MllamaConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    RwkvConfig,
    StableLmConfig,
    WhisperConfig,
    XLNetConfig,
)

from dovetail.models.backbone import refuse_attention_that_cannot_be_packed
from dovetail.models.errors import ModelError
from dovetail.models.folder import check_model_folder
from dovetail.models.load import build_meta_model, materialize
from dovetail.models.policy import PolicyModel
from dovetail.models.value import ValueModel
from dovetail.models.weights import load_weights
from tests.models.tiny import ragged_batch, run_model, tiny_config

pytestmark = pytest.mark.unit

SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
OWN_ATTENTION: dict[str, tuple[PretrainedConfig, str]] = {
    "falcon": (FalconConfig(**SMALL), "code of its own"),
    "gpt_neo": (
        GPTNeoConfig(**SMALL, attention_types=[[["global", "local"], 1]], window_size=4),
        "code of its own",
    ),
    "gptj": (GPTJConfig(vocab_size=320, n_embd=32, n_layer=1, n_head=2, rotary_dim=8, n_positions=64), "its own"),
    "bloom": (BloomConfig(vocab_size=320, hidden_size=32, n_layer=1, n_head=2), "takes no position ids"),
    "stablelm": (StableLmConfig(**SMALL, num_key_value_heads=2), "does not hand keywords"),
    "gpt_oss": (
        GptOssConfig(
            **SMALL, num_key_value_heads=1, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        "asks attention for s_aux, which",
    ),
    "doge": (DogeConfig(**SMALL, num_key_value_heads=1), "an attention mask of its own making"),
    "phimoe": (
        PhimoeConfig(
            **SMALL, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
            router_jitter_noise=0.0,
        ),
        "sliding_window=4 into the mask alone",
    ),
    "qwen2_moe": (
        Qwen2MoeConfig(
            **SMALL, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            shared_expert_intermediate_size=32, use_sliding_window=True, sliding_window=4, max_window_layers=2,
        ),
        "sliding_window=4 into the mask alone",
    ),
    "gemma2": (
        Gemma2Config(**SMALL, num_key_value_heads=1, head_dim=16, sliding_window=4, attn_logit_softcapping=2.0),
        "asks attention for softcap=2.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_models_with_attention_of_their_own_are_trained_padded_and_refused_packed(family: str, tmp_path: Path) -> None:
    """Packed they ended in errors at the first step, or computed something else: Doge was 0.05 nats off on a tiny
    model, windows of PhiMoE and Qwen2-MoE were left out (4.2 nats)."""
    config, says = OWN_ATTENTION[family]
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    for parameter in plain.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.1)
    plain.save_pretrained(tmp_path)
    check_model_folder(tmp_path)
    with pytest.raises(ModelError, match=f"{says}.*use_remove_padding=False"):
        check_model_folder(tmp_path, packs=True)
    policy = PolicyModel(build_meta_model(tmp_path), use_remove_padding=False)
    materialize(policy, "cpu")
    load_weights(policy, tmp_path)
    batch = ragged_batch([4, 19, 11], total=22, side="left")
    with torch.no_grad():
        found = run_model(policy.eval(), **batch).log_probs
        for ids, mask, row in zip(batch["input_ids"], batch["attention_mask"].bool(), found, strict=True):
            alone = ids[mask][None]
            logits = plain(input_ids=alone, use_cache=False).logits[0]
            want = logits.log_softmax(-1)[:-1].gather(-1, alone[0, 1:, None]).squeeze(-1)
            torch.testing.assert_close(row[mask][1:], want, atol=1e-5, rtol=1e-5)


def test_layers_run_without_numbers_as_far_as_packed_attention() -> None:
    """Else the check before a run would pass whatever the attention."""
    model = build_meta_model(tiny_config("mistral_window"))
    seen = []
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
    refuse_attention_that_cannot_be_packed(model)
    assert seen == [(1, 8, 128)]


_IMAGES = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2, "intermediate_size": 32,
    "vision_output_dim": 64, "image_size": 28, "patch_size": 14, "intermediate_layers_indices": [0],
}  # fmt: skip
MLLAMA = MllamaConfig(
    text_config={**SMALL, "num_key_value_heads": 2, "cross_attention_layers": [0]}, vision_config=_IMAGES
)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            Llama4TextConfig(**SMALL, intermediate_size_mlp=48, num_local_experts=2),
            "base_model_prefix='language_model'",
        ),
        (XLNetConfig(vocab_size=320, d_model=32, n_layer=1, n_head=2, d_inner=48), "attend to later ones"),
        (RwkvConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1), "takes padding for tokens"),
        (MLLAMA, "needs a mask of images for every token"),
    ],
)
def test_networks_that_are_no_causal_decoder_of_padded_rows_are_refused(config: PretrainedConfig, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        PolicyModel(build_meta_model(config), use_remove_padding=False)


def test_a_critic_with_an_encoder_is_refused() -> None:
    sizes = {"d_model": 36, "encoder_layers": 1, "decoder_layers": 1}
    with pytest.raises(ModelError, match="WhisperModel has an encoder beside its decoder"):
        ValueModel(build_meta_model(WhisperConfig(**sizes), "value"), use_remove_padding=False)


@pytest.mark.parametrize("side", ["left", "right"])
def test_sparse_attention_sees_the_same_tokens_whatever_the_padding(side: str) -> None:
    """With 32 heads no two tokens have one score. With 2 many score exactly 0, and which of them are seen depends on
    the length of the row: padded rows of such a model are another choice, and no better or worse one."""
    config = DeepseekV32Config(
        **SMALL, num_key_value_heads=2, moe_intermediate_size=32, n_routed_experts=4, n_group=2, topk_group=2,
        num_experts_per_tok=2, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
        index_topk=4, index_head_dim=32, index_n_heads=32, first_k_dense_replace=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.08)
    batch = ragged_batch([5, 21, 13], total=24, side=side)
    with torch.no_grad():
        found = run_model(PolicyModel(model, use_remove_padding=False), **batch).log_probs
        for ids, mask, row in zip(batch["input_ids"], batch["attention_mask"].bool(), found, strict=True):
            logits = model(input_ids=ids[mask][None], use_cache=False).logits[0]
            want = logits.log_softmax(-1)[:-1].gather(-1, ids[mask][1:, None]).squeeze(-1)
            torch.testing.assert_close(row[mask][1:], want, atol=1e-5, rtol=1e-5)
