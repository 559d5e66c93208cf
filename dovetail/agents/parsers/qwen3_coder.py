"""Calls as tags, <function=name> and <parameter=key>: Qwen3-Coder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.agents.parsers.base import Schemas, after_thinking, failed
from dovetail.agents.parsers.hermes import TOOL_CALL
from dovetail.agents.types import ToolCall

_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*?)(</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)(</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


class Qwen3CoderParser:
    """Values are text; a schema, or else their look, says which are numbers, lists and the like."""

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        start = after_thinking(text)
        calls: list[ToolCall] = []
        for match in TOOL_CALL.finditer(text, start):
            calls.append(_call(match.group().strip(), tools))
        rest = TOOL_CALL.sub("", text[start:])
        for match in _FUNCTION.finditer(rest):  # the outer tag is often forgotten
            calls.append(_call(match.group().strip(), tools))
        return text[:start] + _FUNCTION.sub("", rest), calls


def _call(text: str, tools: Schemas) -> ToolCall:
    function = _FUNCTION.search(text)
    if function is None or not function.group(1).strip():
        return failed("a call needs <function=name> and </function>", text)
    name, body = function.group(1).strip(), function.group(2)
    types = _types(name, tools)
    arguments: dict[str, Any] = {}
    for parameter in _PARAMETER.finditer(body):
        key = parameter.group(1).strip()
        if not parameter.group(3) and parameter.end() == len(body):
            return failed(f"<parameter={key}> is not closed", text, name)
        arguments[key] = _value(parameter.group(2).removeprefix("\n").removesuffix("\n"), types.get(key))
    return ToolCall(name, arguments, text=text)


def _types(name: str, tools: Schemas) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: value.get("type") for key, value in properties.items() if isinstance(value, Mapping)}
    return {}


def _value(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        # Python's own spelling of two constants is common in what models write.
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
