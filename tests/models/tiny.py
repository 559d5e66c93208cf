"""Tiny random models of real architectures, for tests: real config classes, two layers, saved as folders.

Heads are 32 wide because CPU engines take no smaller ones; there are 4 of them over 2 KV heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cohere2Config,
    DeepseekV3Config,
    Exaone4Config,
    FalconH1Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from dovetail.models.backbone import TransformerBackbone
from dovetail.models.transfer import to_device

VOCAB_SIZE = 320
IMAGE_TOKEN, VISION_START, VISION_END = 300, 301, 302

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2}
_WINDOW_IN_FIRST_LAYER: dict[str, Any] = {
    "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip

# See the last 8 tokens, in all layers or in the first.
WINDOWED = ("mistral_window", "phi3", "gemma3_text", "olmo3", "cohere2", "exaone4")
TEXT_FAMILIES = ("llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe", "mixtral", *WINDOWED)
FAMILIES = (*TEXT_FAMILIES, "qwen2_5_vl")


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    if family == "llama":
        return LlamaConfig(**_TEXT | {"tie_word_embeddings": False, "head_dim": 32} | overrides)
    if family == "llama_tied":
        return LlamaConfig(**_TEXT | {"tie_word_embeddings": True, "head_dim": 32} | overrides)
    if family == "qwen2":
        return Qwen2Config(**_TEXT | {"tie_word_embeddings": True} | overrides)
    if family == "qwen3":
        return Qwen3Config(**_TEXT | {"head_dim": 32} | overrides)
    if family == "qwen3_moe":
        moe = {"head_dim": 32, "num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": True}
        return Qwen3MoeConfig(**_TEXT | _MOE | moe | overrides)
    if family == "mixtral":
        return MixtralConfig(**_TEXT | _MOE | {"num_local_experts": 4, "sliding_window": None} | overrides)
    if family == "qwen2_moe":
        moe = {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
        return Qwen2MoeConfig(**_TEXT | _MOE | moe | overrides)
    if family == "olmoe":
        return OlmoeConfig(**_TEXT | _MOE | {"num_experts": 4} | overrides)
    if family == "deepseek_v3":  # the first layer is dense; 2 of 4 groups of 2 experts
        moe = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 48, "n_shared_experts": 1}
        latent = {
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        }
        heads = {"num_key_value_heads": 4, "first_k_dense_replace": 1, "num_hidden_layers": 3}
        return DeepseekV3Config(**_TEXT | _MOE | moe | latent | heads | overrides)
    if family == "mistral_window":
        return MistralConfig(**_TEXT | {"head_dim": 32, "sliding_window": 8} | overrides)
    if family == "gemma3_text":  # layers differ in their rotary embedding, too
        return Gemma3TextConfig(**_TEXT | _WINDOW_IN_FIRST_LAYER | {"head_dim": 32} | overrides)
    if family == "olmo3":
        return Olmo3Config(**_TEXT | _WINDOW_IN_FIRST_LAYER | overrides)
    if family == "cohere2":
        return Cohere2Config(**_TEXT | _WINDOW_IN_FIRST_LAYER | overrides)
    if family == "exaone4":
        return Exaone4Config(**_TEXT | _WINDOW_IN_FIRST_LAYER | overrides)
    if family == "phi3":
        return Phi3Config(**_TEXT | {"sliding_window": 8} | overrides)
    if family == "qwen2_window":
        window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}  # not in the first layer
        return Qwen2Config(**_TEXT | window | overrides)
    if family == "opt":  # its decoder is inside another module, as in models that see images
        sizes = {"ffn_dim": 160, "word_embed_proj_dim": 128, "dropout": 0.0}
        return OPTConfig(**{k: v for k, v in _TEXT.items() if k != "num_key_value_heads"} | sizes | overrides)
    if family == "falcon_h1":  # cannot be packed
        mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
        return FalconH1Config(**_TEXT | mamba | {"lm_head_multiplier": 0.25} | overrides)
    if family == "qwen2_5_vl":
        return _vision_language_config(overrides)
    raise ValueError(f"no tiny model called {family!r}; there are {', '.join(FAMILIES)}.")


def tiny_model(family: str, *, seed: int = 0, attn_implementation: str = "sdpa", **overrides: Any) -> Any:
    """A float32 model in eval mode with weights large enough that every part of it matters."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = tiny_config(family, **overrides)
    auto = AutoModelForImageTextToText if family == "qwen2_5_vl" else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = auto.from_config(config, attn_implementation=attn_implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.08)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.05)
    return model.eval()


def save_tiny_model(family: str, folder: Path, *, seed: int = 0, tokenizer: bool = True, **overrides: Any) -> Path:
    """A folder as a user would have it: config, safetensors, and a byte tokenizer with a chat template."""
    tiny_model(family, seed=seed, **overrides).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def save_tiny_vision_model(folder: Path, *, seed: int = 0, with_videos: bool = False) -> Path:
    """The same with a processor: patches of 4 x 4 pixels, a placeholder for every 2 x 2 of them.

    With videos it is Qwen2.5-VL's own, which vLLM insists on and which needs torchvision.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from tests.models.tiny_processor import TinyVisionProcessor

    save_tiny_model("qwen2_5_vl", folder, seed=seed, tokenizer=False)
    patches: dict[str, Any] = {
        "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 4096,
    }  # fmt: skip
    images, tokenizer = Qwen2VLImageProcessorPil(**patches), tiny_vision_tokenizer()
    if with_videos:
        from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor

        Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(**patches)).save_pretrained(folder)
    else:
        TinyVisionProcessor(images, tokenizer).save_pretrained(folder)
    return folder


def tiny_vision_tokenizer() -> PreTrainedTokenizerFast:
    """`tiny_tokenizer` with the placeholders of `tiny_config("qwen2_5_vl")`, and parts of messages in its template."""
    tokenizer = tiny_tokenizer()
    unused = [f"<|unused_{number}|>" for number in range(len(tokenizer), IMAGE_TOKEN)]
    places = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
    tokenizer.add_tokens(unused + places, special_tokens=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: ids 3 to 258; 0 pads, 1 begins, 2 ends."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<s>", "</s>"]
    vocabulary = {token: index for index, token in enumerate(specials + letters)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


def run_model(
    model: TransformerBackbone,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    *,
    token_mask: Tensor | None = None,
    multi_modal_inputs: dict[str, Tensor] | None = None,
    routed_experts: Any = None,
    **options: Any,
) -> Any:
    """Call a model on padded columns, as a backend does."""
    device = next(model.parameters()).device
    batch = model.prepare(
        input_ids,
        attention_mask,
        position_ids,
        token_mask=token_mask,
        multi_modal_inputs=multi_modal_inputs,
        routed_experts=routed_experts,
    )
    return model(to_device(batch, device), multi_modal_inputs=to_device(multi_modal_inputs, device), **options)


def ragged_batch(lengths: list[int], *, total: int | None = None, side: str = "right", seed: int = 0) -> dict[str, Any]:
    """Random ids `[B, T]` with padding on a side; `side="both"` puts prompts left and responses right of the middle."""
    generator = torch.Generator().manual_seed(seed)
    total = total or max(lengths)
    ids, mask = torch.zeros(len(lengths), total, dtype=torch.long), torch.zeros(len(lengths), total, dtype=torch.long)
    for row, length in enumerate(lengths):
        first = {"right": 0, "left": total - length, "both": (total - length) // 2}[side]
        ids[row, first : first + length] = torch.randint(3, 290, (length,), generator=generator)
        mask[row, first : first + length] = 1
    return {"input_ids": ids, "attention_mask": mask}


def image_batch(*, seed: int = 0) -> dict[str, Any]:
    """Three rows for the tiny vision-language model: an image of 4x4 patches, text only, an image of 4x8 patches."""
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        return torch.randint(3, 290, (count,), generator=generator).tolist()

    rows = [
        [*text(3), VISION_START, *[IMAGE_TOKEN] * 4, VISION_END, *text(6)],
        text(9),
        [VISION_START, *[IMAGE_TOKEN] * 8, VISION_END, *text(4)],
    ]
    width = max(map(len, rows)) + 2
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):  # left padding by 1, the rest on the right
        ids[i, 1 : 1 + len(row)] = torch.tensor(row)
        mask[i, 1 : 1 + len(row)] = 1
    grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4, generator=generator)
    images = {"pixel_values": pixels, "image_grid_thw": grid}
    return {"input_ids": ids, "attention_mask": mask, "multi_modal_inputs": images}


def _vision_language_config(overrides: dict[str, Any]) -> PretrainedConfig:
    text = _TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLConfig(
        text_config=text | overrides,
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        video_token_id=303,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
