"""Calls between DeepSeek's own tokens, as a block of JSON (V3, R1) or as JSON alone (V3.1)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dovetail.agents.parsers.base import SPACE_BEFORE, after_thinking, arguments_of, failed
from dovetail.agents.types import Schemas, ToolCall

_BEGIN, _END, _SEPARATOR, _ALL_BEGIN, _ALL_END = (
    f"<\uff5ctool▁{name}\uff5c>" for name in ("call▁begin", "call▁end", "sep", "calls▁begin", "calls▁end")
)
_CALL = re.compile(rf"{SPACE_BEFORE}{_BEGIN}(.*?)(?:{_END}|(?={_BEGIN}|{_ALL_END})|\Z)", re.DOTALL)
_SECTION = re.compile(rf"{SPACE_BEFORE}(?:{_ALL_BEGIN}|{_ALL_END})")
_BLOCK = re.compile(r"\s*(\S+)\s*```(?:json)?\s*(.*?)\s*(?:```\s*)?", re.DOTALL)


class DeepSeekParser:
    """V3 writes `function`, a separator, the name and a block; V3.1 the name, a separator and JSON."""

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        start = after_thinking(text)
        calls = [_call(match.group(1), match.group().strip()) for match in _CALL.finditer(text, start)]
        return text[:start] + _SECTION.sub("", _CALL.sub("", text[start:])), calls


def _call(body: str, text: str) -> ToolCall:
    head, separated, rest = body.partition(_SEPARATOR)
    if not separated or not head.strip():
        return failed(f"a call needs its name and {_SEPARATOR}", text)
    if head.strip() == "function" and (block := _BLOCK.fullmatch(rest)) is not None:
        return arguments_of(block.group(2), block.group(1), text)
    return arguments_of(rest, head.strip(), text)
