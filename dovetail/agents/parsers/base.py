"""What a parser is, and the parts that several formats share. Executes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from dovetail.agents.types import Schemas, ToolCall

_NAME = re.compile(r'"name"\s*:\s*"([^"]*)"')
_NULLS = ("null", "None")
SPACE_BEFORE = r"(?:(?<!\s)\s+)?"
"""White space before a call, from its first character only: a model that writes nothing else must not cost the square
of it."""


class Parser(Protocol):
    """One model family's way to write calls. A call that cannot be read is a call with `error`, never an exception."""

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        """What was said and what was called, of a turn without its stop token.

        `text` is decoded with its special tokens. Thinking stays in what was said, as <think>...</think>.
        """
        ...


def after_thinking(text: str, tag: str = "think") -> int:
    """Where the thinking ends: what looks like a call before it is none. A thought without end is all there is."""
    end = text.rfind(f"</{tag}>")
    if end >= 0:
        return end + len(f"</{tag}>")
    return len(text) if text.lstrip().startswith(f"<{tag}>") else 0


def calls_of_json(written: str, *, text: str, arguments: Sequence[str] = ("arguments",)) -> list[ToolCall]:
    """The calls in a piece of JSON, an object or a list of them; `arguments` are the keys that may hold theirs."""
    try:
        value = json.loads(written)
    except (ValueError, RecursionError) as error:
        name = _NAME.search(written)
        return [failed(f"the call is not valid JSON: {error}", text, name.group(1) if name else "")]
    values = value if isinstance(value, list) else [value]
    return [call_of(entry, text=text, arguments=arguments) for entry in values]


def call_of(value: Any, *, text: str, arguments: Sequence[str] = ("arguments",)) -> ToolCall:
    """The call that a JSON value describes."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return failed("a call is an object with a name and arguments", text)
    given = next((value[key] for key in arguments if key in value), {})
    if isinstance(given, str):
        return arguments_of(given, value["name"], text)
    if not isinstance(given, dict):
        return failed(f"the arguments are {json.dumps(given)}, not an object", text, value["name"])
    return ToolCall(value["name"], given, text=text)


def arguments_of(written: str, name: str, text: str) -> ToolCall:
    """A call of which only the arguments are JSON."""
    try:
        value = json.loads(written) if written.strip() else {}
    except (ValueError, RecursionError) as error:
        return failed(f"the arguments are not valid JSON: {error}", text, name)
    if not isinstance(value, dict):
        return failed(f"the arguments are {json.dumps(value)}, not an object", text, name)
    return ToolCall(name, value, text=text)


def types_of(name: str, tools: Schemas) -> dict[str, frozenset[str]]:
    """The types that each argument of a tool may have, by its name, as far as the tool's schema says."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: _types_in(schema) for key, schema in properties.items()}
    return {}


def _types_in(schema: Any) -> frozenset[str]:
    """`{"type": "string"}`, `{"type": ["string", "null"]}`, `{"anyOf": [...]}`, and OpenAPI's `nullable`."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    types = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    for options in (schema.get("anyOf"), schema.get("oneOf")):
        for option in options if isinstance(options, list) else []:
            types |= _types_in(option)
    return frozenset(types | {"null"} if schema.get("nullable") else types)


def value_of(text: str, types: Collection[str] = ()) -> Any:
    """A value that was written as text. Unless it can only be a string, its look says what it is."""
    if "string" in types and {"string", "null"}.issuperset(types):
        return None if "null" in types and text.strip() in _NULLS else text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        # Python's own spelling of two constants is common in what models write.
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def failed(error: str, text: str, name: str = "") -> ToolCall:
    return ToolCall(name, None, text=text, error=error)
