"""The rows of a data set as `sft`, `dpo` and `reward` train on them, and how long they are. Chooses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dovetail.agents.chat import ChatRenderer, ChatTemplateError
from dovetail.agents.chat_media import MediaRenderer
from dovetail.config.root import DovetailConfig
from dovetail.data.conversations import ConversationDataset
from dovetail.data.errors import DataError
from dovetail.data.examples import Renderer
from dovetail.data.preferences import Pair, PreferenceDataset
from dovetail.data.unread_tokenizer import UnreadTokenizer
from dovetail.models.errors import ModelError
from dovetail.trainer.model_folders import load_readers

MOST_ROWS = 1000
_ANY_LENGTH = 1 << 30


class ExampleLengths(NamedTuple):
    """Most tokens of a prompt, of a response, and of a whole row, among the rows that were read."""

    prompt: int
    response: int
    row: int


def read_examples(
    config: DovetailConfig, readers: tuple[Any, Any | None], files: Sequence[str], *, max_samples: int
) -> ConversationDataset | PreferenceDataset:
    """The examples of `trainer.method`; `readers` are the tokenizer, and the processor of a model that sees images."""
    data, (tokenizer, processor) = config.data, readers
    renderer: Renderer | None = None
    if isinstance(tokenizer, UnreadTokenizer):
        renderer = tokenizer
    elif tokenizer.chat_template and processor is not None:
        settings = data.mm_processor_kwargs
        renderer = MediaRenderer(tokenizer, processor, processor_kwargs=settings, **data.apply_chat_template_kwargs)
    elif tokenizer.chat_template:
        renderer = ChatRenderer(tokenizer, **data.apply_chat_template_kwargs)
    source = files, tokenizer, renderer, data
    which = {"max_samples": max_samples, "seed": config.data_seed}
    if config.trainer.method == "sft":
        return ConversationDataset(*source, sft=config.sft, processor=processor, **which)
    labelled = config.trainer.method == "dpo" and config.dpo.loss_type == "kto"
    return PreferenceDataset(*source, labelled=labelled, **which)


def example_lengths(config: DovetailConfig) -> ExampleLengths | None:
    """None where the rows, or the tokenizer, cannot be read: the checks of the run say why."""
    keys = ("max_length", "max_prompt_length", "max_response_length")
    data = config.data.model_copy(update={**dict.fromkeys(keys, _ANY_LENGTH), "filter_overlong_prompts": False})
    config = config.model_copy(update={"data": data})
    try:
        examples = read_examples(config, load_readers(config), data.train_paths, max_samples=MOST_ROWS)
    except (DataError, ModelError, ChatTemplateError, FileNotFoundError):
        return None
    if isinstance(examples, ConversationDataset):
        return ExampleLengths(0, 0, max(len(row.ids) for number in range(len(examples)) for row in examples[number]))
    prompt = response = 0
    for number in range(len(examples)):
        example = examples[number]
        rows = (example.chosen, example.rejected) if isinstance(example, Pair) else (example.response,)
        prompt, response = max(prompt, len(example.prompt)), max(response, *(len(row.ids) for row in rows))
    return ExampleLengths(prompt, response, prompt + response)
