"""From chat messages to token ids of bounded length. Reads no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dovetail.data.errors import DataError

Truncation = Literal["error", "left", "right", "middle"]
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PromptEncoder:
    """Fills in the chat template and tokenises. A plain string is one user message, or mere text without a template."""

    tokenizer: Any
    template_kwargs: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]] | None = None

    def messages(self, prompt: Any, where: str) -> Messages | str:
        """The prompt as messages, or as the text it is."""
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}] if self.tokenizer.chat_template else prompt
        if not isinstance(prompt, (list, tuple)) or not prompt or not all(_is_message(entry) for entry in prompt):
            raise DataError(
                f"{where}: the prompt is {_short(prompt)}; it must be text or a list of messages with role and content."
            )
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{where}: the prompt is a chat, but the tokenizer has no chat template; set "
                "actor_rollout_ref.model.custom_chat_template, or give prompts as plain text."
            )
        # Arrow gives every message all keys of all messages; templates take a None for a value.
        return [{key: value for key, value in message.items() if value is not None} for message in prompt]

    def render(self, messages: Messages | str, where: str) -> str:
        """The prompt's text as the model will see it."""
        if isinstance(messages, str):
            return messages
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=list(self.tools) if self.tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **self.template_kwargs,
            )
        # A template that meets a value of another type than it was written for fails like any Python code.
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"{where}: the chat template refuses the prompt: {error}") from error

    def token_ids(self, texts: Sequence[str], *, is_chat: bool) -> list[list[int]]:
        """Ids of rendered texts. A template writes its own special tokens; a plain text gets the tokenizer's."""
        if not texts:
            return []
        return self.tokenizer(list(texts), add_special_tokens=not is_chat)["input_ids"]

    def encode(self, prompt: Any, where: str) -> list[int]:
        """Ids of one prompt."""
        messages = self.messages(prompt, where)
        return self.token_ids([self.render(messages, where)], is_chat=not isinstance(messages, str))[0]


def pad_prompt(ids: Sequence[int], tokenizer: Any, width: int) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask` and `position_ids` of one prompt, left-padded."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    input_ids = torch.full((width,), int(pad), dtype=torch.int64)
    mask = torch.zeros(width, dtype=torch.int64)
    input_ids[width - len(ids) :] = torch.tensor(ids, dtype=torch.int64)
    mask[width - len(ids) :] = 1
    return {"input_ids": input_ids, "attention_mask": mask, "position_ids": (mask.cumsum(0) - 1).clamp(min=0)}


def truncate(ids: Sequence[int], limit: int, truncation: Truncation, where: str) -> list[int]:
    """At most `limit` ids. `left` drops the beginning, `right` the end, `middle` keeps both ends."""
    if len(ids) <= limit:
        return list(ids)
    if truncation == "left":
        return list(ids[-limit:])
    if truncation == "right":
        return list(ids[:limit])
    if truncation == "middle":
        head = limit // 2
        return [*ids[:head], *ids[len(ids) - (limit - head) :]]
    raise DataError(f"{where}: {too_long(len(ids), limit)}")


def too_long(num_tokens: int, limit: int) -> str:
    """What to say of a prompt that may not be cut."""
    return (
        f"the prompt has {num_tokens} tokens, more than data.max_prompt_length={limit}; raise it to {num_tokens}, set "
        "data.filter_overlong_prompts=True to leave such prompts out, or data.truncation=left to cut."
    )


def _is_message(entry: Any) -> bool:
    """A template would write nothing for a role or a content that is not there."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
        return False
    return entry.get("content") is not None or entry.get("tool_calls") is not None


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
