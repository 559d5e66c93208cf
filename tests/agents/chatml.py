"""A model folder whose ChatML template ends a turn with another token than its generation config names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.tiny import save_tiny_model

EOS, TURN_START, TURN_END = 2, 260, 261
# One new line after the last message, as in ChatML's usual form.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_chatml_model(folder: Path, **sizes: Any) -> Path:
    from transformers import AutoTokenizer

    save_tiny_model("qwen2", folder, **{"hidden_size": 64, "intermediate_size": 96, **sizes})
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [TURN_START, TURN_END]
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
