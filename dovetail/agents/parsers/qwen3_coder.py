"""Calls as tags, <function=name> and <parameter=key>: Qwen3-Coder, Seed-OSS."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dovetail.agents.parsers.base import SPACE_BEFORE, after_thinking, failed, types_of, value_of
from dovetail.agents.parsers.hermes import TOOL_CALL, call_tag
from dovetail.agents.types import Schemas, ToolCall

_FUNCTION = re.compile(rf"{SPACE_BEFORE}<function=([^<>\n]*)>(.*?)(</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>(.*?)(</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


class Qwen3CoderParser:
    """Values are text; a schema, or else their look, says which are numbers, lists and the like."""

    thought, tag = "think", TOOL_CALL

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        start = after_thinking(text, self.thought)
        calls: list[ToolCall] = []
        for match in self.tag.finditer(text, start):
            calls.append(_call(match.group().strip(), tools))
        rest = self.tag.sub("", text[start:])
        for match in _FUNCTION.finditer(rest):  # the outer tag is often forgotten
            calls.append(_call(match.group().strip(), tools))
        return text[:start] + _FUNCTION.sub("", rest), calls


class SeedParser(Qwen3CoderParser):
    """The same in tags of its own."""

    thought, tag = "seed:think", call_tag("seed:tool_call")


def _call(text: str, tools: Schemas) -> ToolCall:
    function = _FUNCTION.search(text)
    if function is None or not function.group(1).strip():
        return failed("a call needs <function=name> and </function>", text)
    name, body = function.group(1).strip(), function.group(2)
    types = types_of(name, tools)
    arguments: dict[str, Any] = {}
    for parameter in _PARAMETER.finditer(body):
        key = parameter.group(1).strip()
        if not parameter.group(3) and parameter.end() == len(body):
            return failed(f"<parameter={key}> is not closed", text, name)
        arguments[key] = value_of(parameter.group(2).removeprefix("\n").removesuffix("\n"), types.get(key, ()))
    return ToolCall(name, arguments, text=text)
