"""Calls as tags, <invoke name="..."> and <parameter name="...">: MiniMax M2, and DeepSeek V3.2 and V4 (DSML)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dovetail.agents.parsers.base import SPACE_BEFORE, after_thinking, failed, types_of, value_of
from dovetail.agents.types import Schemas, ToolCall

_QUOTED = r"""name\s*=\s*["']?([^"'<>]*)["']?"""


class InvokeParser:
    """`mark` stands before the tags' names, `wrappers` are tags around the calls.

    Values are text where the parameter says string="true". Else a schema, or their look, says what they are.
    """

    mark = ""
    wrappers = "minimax:tool_call"

    def __init__(self) -> None:
        mark = re.escape(self.mark)
        begin, end = rf"<{mark}invoke\s+{_QUOTED}\s*>", f"</{mark}invoke>"
        stop = rf"(?:{end}|(?=<{mark}invoke\s)|(?=</{mark}(?:{self.wrappers})>)|\Z)"
        self._call = re.compile(rf"{SPACE_BEFORE}{begin}(.*?){stop}", re.DOTALL)
        self._wrapper = re.compile(rf"{SPACE_BEFORE}</?{mark}(?:{self.wrappers})>")
        given = rf"""<{mark}parameter\s+{_QUOTED}(?:\s+string\s*=\s*"(true|false)")?\s*>"""
        self._parameter = re.compile(rf"{given}(.*?)(</{mark}parameter>|(?=<{mark}parameter\s)|\Z)", re.DOTALL)

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        start = after_thinking(text)
        rest, calls = text[start:], []
        for match in self._call.finditer(rest):
            calls.append(self._read(match.group(1).strip(), match.group(2), match.group().strip(), tools))
        said = self._call.sub("", rest)
        wrapper = self._wrapper.search(said)
        if wrapper is not None and not calls:
            written = said[wrapper.start() :].strip()
            return text[:start] + said[: wrapper.start()], [failed("a call needs <invoke name=...>", written)]
        return text[:start] + self._wrapper.sub("", said), calls

    def _read(self, name: str, body: str, text: str, tools: Schemas) -> ToolCall:
        if not name:
            return failed("a call needs a name", text)
        types = types_of(name, tools)
        arguments: dict[str, Any] = {}
        for parameter in self._parameter.finditer(body):
            key, is_text, value, closed = parameter.groups()
            if not closed and parameter.end() == len(body):
                return failed(f"the parameter {key} is not closed", text, name)
            arguments[key] = value_of(value, ["string"] if is_text == "true" else types.get(key, ()))
        return ToolCall(name, arguments, text=text)


class DsmlParser(InvokeParser):
    """DeepSeek's tags."""

    mark = "\uff5cDSML\uff5c"
    wrappers = "function_calls|tool_calls"
