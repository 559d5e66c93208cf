"""How long the rows of a data set are: some of them are encoded as `sft`, `dpo` and `reward` will. Chooses nothing."""

from __future__ import annotations

from typing import NamedTuple

from dovetail.agents.chat import ChatRenderer, ChatTemplateError
from dovetail.config.root import DovetailConfig
from dovetail.data.conversations import ConversationDataset
from dovetail.data.errors import DataError
from dovetail.data.preferences import Pair, PreferenceDataset
from dovetail.models.errors import ModelError
from dovetail.trainer.model_folders import load_readers

MOST_ROWS = 1000
_ANY_LENGTH = 1 << 30


class ExampleLengths(NamedTuple):
    """Most tokens of a prompt, of a response, and of a whole row, among the rows that were read."""

    prompt: int
    response: int
    row: int


def example_lengths(config: DovetailConfig) -> ExampleLengths | None:
    """None where the rows, or the tokenizer, cannot be read: the checks of the run say why."""
    keys = ("max_length", "max_prompt_length", "max_response_length")
    data = config.data.model_copy(update={**dict.fromkeys(keys, _ANY_LENGTH), "filter_overlong_prompts": False})
    which = {"max_samples": MOST_ROWS, "seed": config.data_seed}
    try:
        tokenizer, _ = load_readers(config)
        renderer = ChatRenderer(tokenizer, **data.apply_chat_template_kwargs) if tokenizer.chat_template else None
        if config.trainer.method == "sft":
            talks = ConversationDataset(data.train_paths, tokenizer, renderer, data, config.sft, **which)
            return ExampleLengths(0, 0, max(len(row.ids) for number in range(len(talks)) for row in talks[number]))
        labelled = config.trainer.method == "dpo" and config.dpo.loss_type == "kto"
        preferences = PreferenceDataset(data.train_paths, tokenizer, renderer, data, labelled=labelled, **which)
    except (DataError, ModelError, ChatTemplateError, FileNotFoundError):
        return None
    prompt = response = 0
    for number in range(len(preferences)):
        example = preferences[number]
        rows = (example.chosen, example.rejected) if isinstance(example, Pair) else (example.response,)
        prompt, response = max(prompt, len(example.prompt)), max(response, *(len(row.ids) for row in rows))
    return ExampleLengths(prompt, response, prompt + response)
