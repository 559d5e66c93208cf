"""A name, then keys and values as tags: GLM-4.5 to 4.7."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dovetail.agents.parsers.base import after_thinking, failed, types_of, value_of
from dovetail.agents.parsers.hermes import TOOL_CALL
from dovetail.agents.types import Schemas, ToolCall

_NAME = re.compile(r"\s*([^\s<]+)\s*(?=<arg_key>|\Z)")
_ARGUMENT = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


class GlmParser:
    """Values are text; a schema, or else their look, says which are numbers, lists and the like."""

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        start = after_thinking(text)
        calls = [_call(match.group(1), match.group().strip(), tools) for match in TOOL_CALL.finditer(text, start)]
        return text[:start] + TOOL_CALL.sub("", text[start:]), calls


def _call(body: str, text: str, tools: Schemas) -> ToolCall:
    name = _NAME.match(body)
    if name is None:
        return failed("a call needs a name, and then <arg_key> and <arg_value>", text)
    types, end = types_of(name.group(1), tools), name.end()
    arguments: dict[str, Any] = {}
    while (argument := _ARGUMENT.match(body, end)) is not None:
        key = argument.group(1).strip()
        arguments[key], end = value_of(argument.group(2), types.get(key, ())), argument.end()
    if rest := body[end:].strip():
        return failed(f"<arg_key>key</arg_key><arg_value>value</arg_value> does not go on at {rest:.40}", text, name[1])
    return ToolCall(name.group(1), arguments, text=text)
