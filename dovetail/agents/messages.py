"""Chat messages compared and copied. What the model wrote may come back from a loop in other JSON, or trimmed."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.agents.types import Message


def begins_with(messages: Sequence[Message], known: Sequence[Message]) -> bool:
    """Whether the first messages say what `known` says, as far as both go."""
    return all(
        mine == theirs or _canonical(mine) == _canonical(theirs) for mine, theirs in zip(known, messages, strict=False)
    )


def copied(message: Message) -> Message:
    """A message that nobody else has."""
    return {key: value if isinstance(value, str) else copy.deepcopy(value) for key, value in message.items()}


def _canonical(message: Message) -> tuple[Any, ...]:
    """What two messages must have in common to be the same one: role, text, calls and their arguments."""
    return (
        message.get("role"),
        _text(message.get("content"), stripped=message.get("role") == "assistant"),
        [_call(call) for call in message.get("tool_calls") or ()],
    )


def _text(content: Any, *, stripped: bool) -> Any:
    """Text as it is; parts that are not text as JSON. What the model wrote may come back without its outer spaces."""
    if isinstance(content, list):
        texts = [
            part.get("text") if part.get("type") == "text" else json.dumps(part, sort_keys=True) for part in content
        ]
        content = "".join(text or "" for text in texts)
    content = content or ""
    return content.strip() if stripped else content


def _call(call: Mapping[str, Any]) -> Any:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return function.get("name"), arguments
