"""Calls as JSON behind an id, functions.name:0: Kimi K2."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dovetail.agents.parsers.base import SPACE_BEFORE, after_thinking, arguments_of, failed
from dovetail.agents.types import Schemas, ToolCall

_CALL = re.compile(
    rf"{SPACE_BEFORE}<\|tool_call_begin\|>(.*?)"
    r"(?:<\|tool_call_end\|>|(?=<\|tool_call_begin\|>|<\|tool_calls_section_end\|>)|\Z)",
    re.DOTALL,
)
_SECTION = re.compile(rf"{SPACE_BEFORE}<\|tool_calls_section_(?:begin|end)\|>")
_ID = re.compile(r"\s*(?:functions\.)?([^\s:]+):\d+\s*")


class KimiParser:
    """A call that is not closed ends at the next one, with its section or with the turn."""

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        start = after_thinking(text)
        calls = [_call(match.group(1), match.group().strip()) for match in _CALL.finditer(text, start)]
        return text[:start] + _SECTION.sub("", _CALL.sub("", text[start:])), calls


def _call(body: str, text: str) -> ToolCall:
    header, begins, arguments = body.partition("<|tool_call_argument_begin|>")
    called = _ID.fullmatch(header)
    if called is None or not begins:
        return failed("a call needs an id, functions.name:0, and <|tool_call_argument_begin|>", text)
    return arguments_of(arguments, called.group(1), text)
