"""What a model has to write after a generation prompt, from what the chat template writes in the history.

They differ where the prompt opens `<think>` and the history has no thinking (DeepSeek-R1, QwQ), where the prompt closes
it (`enable_thinking=False`), and where the template drops an answer's thinking. Text only; knows no tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
THINKING_TAG = re.compile(r"([<\[])(/?)([\w:]*think\w*)([>\]])", re.IGNORECASE)
_EMPTY = re.compile(r"(\s*)([<\[][\w:]*think\w*[>\]])(\s*)([<\[]/[\w:]*think\w*[>\]])(\s*)", re.IGNORECASE)


class LostThinkingError(ValueError):
    """An answer's thinking would not be in the row, or not where the model writes it."""


class Prompt(NamedTuple):
    """A rendered prompt: the conversation, and the generation prompt at its end."""

    text: str
    generation: str
    """Empty where the prompt has no tag of thinking at all."""


class Answer(NamedTuple):
    """An answer's parts. `thought`: the thinking in its content, with the tag that closes it and the space after it."""

    reasoning: str
    thought: str
    said: str

    @property
    def has_thinking(self) -> bool:
        return bool(self.reasoning or self.thought)

    @property
    def is_empty_thinking(self) -> bool:
        """Tags alone, as data for a model that is not to think has them."""
        return not self.reasoning and not THINKING_TAG.sub("", self.thought).strip()

    @property
    def begins(self) -> str:
        """For a message."""
        return (self.reasoning or self.thought)[:60]


def split_answer(message: Mapping[str, Any], generation: str) -> Answer:
    """The parts of a message. Without an opening tag a content has thinking only where the prompt has opened it."""
    content = text_of(message)
    reasoning = next((str(message[key]).strip() for key in REASONING_KEYS if message.get(key)), "")
    begins, last = THINKING_TAG.match(content.lstrip()), _last_tag(generation)
    opened = begins if begins and not begins[2] else last
    if opened is None or opened[2]:
        return Answer(reasoning, "", content)
    head, close, said = content.rpartition(_closing(opened))
    if not close:
        if begins and not begins[2]:
            raise LostThinkingError(f"its thinking is not closed: {content[:60]!r} has no {_closing(opened)}; add it.")
        return Answer(reasoning, "", content)
    space = said[: len(said) - len(said.lstrip())]
    return Answer(reasoning, head + close + space, said[len(space) :])


def written_after(prompt: Prompt, full: str, message: Mapping[str, Any]) -> str | None:
    """The text after `prompt` that says what `full`, the rendered conversation, says of the message; to its very end.

    None where the template writes something else before the answer than in the prompt for it. `LostThinkingError` where
    the answer's thinking has no place.
    """
    answer, last, header = split_answer(message, prompt.generation), _last_tag(prompt.generation), prompt.text
    if last is not None and last[2] and answer.has_thinking and not answer.is_empty_thinking:
        raise LostThinkingError(
            f"an answer has thinking ({answer.begins!r}), but the prompt for it ends with {prompt.generation[-40:]!r}, "
            "which leaves none to write; render with thinking (data.apply_chat_template_kwargs), or take it out."
        )
    if last is not None and not full.startswith(header):
        first = THINKING_TAG.search(prompt.generation)
        assert first is not None
        header = header[: len(header) - len(prompt.generation) + first.start()]
    if not full.startswith(header):
        return None
    rest, is_exact = full[len(header) :], header == prompt.text
    if last is None:
        rest = _with_thinking(rest, answer, message)
    elif not last[2]:
        rest = _closed(rest, answer, message, last, prompt.generation.rpartition(last[0])[2])
    elif not is_exact and THINKING_TAG.match(rest.lstrip()):
        return None
    if answer.has_thinking and not _shows(prompt.generation + rest, message):
        raise LostThinkingError(
            f"the chat template drops the thinking of an answer ({answer.begins!r}); put it into the content as the "
            "model writes it ('<think>\\n...\\n</think>\\n\\n' before the answer), under the key that the template "
            "reads, or set actor_rollout_ref.model.custom_chat_template to one that writes it."
        )
    return rest


def _closed(rest: str, answer: Answer, message: Mapping[str, Any], tag: re.Match[str], space: str) -> str:
    """After a prompt that opens the thinking, with `space` after its tag: the thinking comes first, and is closed."""
    close = _closing(tag)
    if rest.lstrip().startswith(tag[0]):  # once in the prompt is enough
        rest = rest.lstrip().removeprefix(tag[0]).removeprefix(space)
    before = rest.partition(answer.said.strip())[0] if answer.said.strip() else rest
    if close in before and (not answer.has_thinking or _shows(tag[0] + rest, message)):
        return rest
    if answer.thought:
        thinking = answer.thought.lstrip().removeprefix(tag[0]).removeprefix(space)
    else:  # an answer without any closes it at once
        thinking = f"{answer.reasoning}{space}{close}{space * 2}"
    return thinking + rest.lstrip().removeprefix(close).lstrip()


def _with_thinking(rest: str, answer: Answer, message: Mapping[str, Any]) -> str:
    """What the history shows, with the thinking that the model writes by itself where the history has none of it."""
    empty = _EMPTY.match(rest)
    if not answer.has_thinking or (empty is None and _shows(rest, message)):
        return rest
    if empty is None:
        return rest if answer.reasoning else answer.thought + rest.lstrip()
    lead, tag, space, close, after = empty.groups()
    space = space[: len(space) // 2]
    thinking = answer.thought.rstrip() or f"{tag}{space}{answer.reasoning}{space}{close}"
    return lead + thinking + after + rest[empty.end() :].removeprefix(answer.thought)


def _shows(text: str, message: Mapping[str, Any]) -> bool:
    return lost_part(message, text) is None


def lost_part(answer: Mapping[str, Any], body: str) -> str | None:
    """A part of the answer that the text does not show. Templates may trim and wrap; spaces do not count."""
    parts = [answer[key] for key in REASONING_KEYS if answer.get(key)][:1]
    parts += [text_of(answer)]
    parts += [call["function"]["name"] for call in answer.get("tool_calls", ())]
    squashed, position = "".join(body.split()), 0
    for part in parts:
        wanted = "".join(part.split())
        position = squashed.find(wanted, position)
        if position < 0:
            return part
        position += len(wanted)
    return None


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, of all its parts where it has parts."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or () if isinstance(part.get("text"), str))


def _last_tag(text: str) -> re.Match[str] | None:
    return max(THINKING_TAG.finditer(text), key=lambda tag: tag.start(), default=None)


def _closing(tag: re.Match[str]) -> str:
    return f"{tag[1]}/{tag[3]}{tag[4]}"
