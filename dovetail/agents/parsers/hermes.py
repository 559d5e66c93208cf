"""Calls as JSON between <tool_call> and </tool_call>: Hermes, Qwen 2.5 and 3, SmolLM."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dovetail.agents.parsers.base import SPACE_BEFORE, after_thinking, calls_of_json
from dovetail.agents.types import Schemas, ToolCall


def call_tag(name: str) -> re.Pattern[str]:
    """What stands in a tag of this name. One that is not closed ends at the next one, or with the turn."""
    return re.compile(rf"{SPACE_BEFORE}<{name}>(.*?)(?:</{name}>|(?=<{name}>)|\Z)", re.DOTALL)


TOOL_CALL = call_tag("tool_call")


class HermesParser:
    """Reads one call, or a list of them, from each tag."""

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        start = after_thinking(text)
        calls: list[ToolCall] = []
        for match in TOOL_CALL.finditer(text, start):
            calls += calls_of_json(match.group(1), text=match.group().strip())
        return text[:start] + TOOL_CALL.sub("", text[start:]), calls
