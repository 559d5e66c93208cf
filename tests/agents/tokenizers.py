"""Tokenizers with the chat templates of ten model families, small and built at once."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = tuple(sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
# Markup that these families have as tokens of their own, but not as special ones.
PLAIN_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_EOS = {
    "qwen2.5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gpt-oss": "<|return|>",
    "gemma": "<end_of_turn>",
    "phi": "<|endoftext|>",
    "deepseek-r1": "<\uff5cend▁of▁sentence\uff5c>",
    "glm": "<|endoftext|>",
    "smollm2": "<|im_end|>",
}
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|observation|>")
_CORPUS = (
    "You are a helpful assistant.\n\n# Tools\nname arguments content user system tool json\n",
    '{"name": "look_up", "arguments": {"word": "found"}}\n\n\n< | im_end > im_start end of turn {"',
    "The answer is 42. Let me see what the tool says: the results of two calls.\n  \n\t",
)


@cache
def family_tokenizer(family: str) -> Any:
    """A byte-level BPE with a few merges, across spaces and new lines, and the family's template and special tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template = (TEMPLATES / f"{family}.jinja").read_text()
    core = Tokenizer(models.BPE())
    # New lines are tokens of their own, as in all these families: what a prompt ends with is not merged with an answer.
    words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|[^\S\r\n]?\w+|[^\s\w]+|\s+"), "isolated")
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of_words])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    markup = set(re.findall("<[|\uff5c]?[\\w/▁]+[|\uff5c]?>|\\[/?[A-Za-z_]{3,}\\]", re.sub(r"\{#.*?#\}", "", template)))
    if family in ("phi", "glm"):
        markup.update(_ROLES)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token=_EOS.get(family, "</s>"))
    tokenizer.add_tokens([AddedToken(text, special=text not in PLAIN_MARKUP) for text in sorted(markup)])
    tokenizer.chat_template = template
    return tokenizer
