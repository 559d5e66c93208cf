"""A random model of two layers with a byte tokenizer, as a folder: for checks that need no download and no package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

NAME = "toy-llama-2-layers"


def save_toy_model(folder: Path, **sizes: Any) -> Path:
    """A Llama with a tied head, of other `sizes` where they are given; CPU engines take no heads below 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small: dict[str, Any] = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(**{**small, **sizes}, **ids, tie_word_embeddings=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # Large enough that every part changes what comes out: the usual 0.02 hides a wrong layer.
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.08)
    model.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


def _byte_tokenizer() -> Any:
    """One token per byte: ids 3 to 258; 0 pads, 1 begins, 2 ends."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *letters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    return tokenizer
