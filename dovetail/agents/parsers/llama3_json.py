"""Calls as bare JSON, {"name": ..., "parameters": {...}}: Llama 3.1 to 3.3."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from dovetail.agents.parsers.base import after_thinking, call_of, calls_of_json
from dovetail.agents.types import Schemas, ToolCall

_PYTHON_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_BEGIN = re.compile(r'\{\s*"(?:name|type|parameters|arguments)"\s*:')
_BETWEEN = re.compile(r"\s*[;,]?\s*")


class Llama3JsonParser:
    """Objects with a name and parameters are calls, wherever they stand; other JSON is text."""

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        position = after_thinking(text)
        said, calls = text[:position], []
        while (match := _BEGIN.search(text, position)) is not None:
            before = text[position : match.start()]
            try:
                value, end = json.JSONDecoder().raw_decode(text, match.start())
            except (ValueError, RecursionError):
                # JSON that breaks off is a call only where one is expected: in front, or after another one.
                if before.replace(_PYTHON_TAG, "").strip(" \n;,"):
                    break
                written = text[match.start() :]
                return said, [*calls, *calls_of_json(written, text=written)]
            if isinstance(value, dict) and isinstance(value.get("name"), str) and any(key in value for key in _KEYS):
                said += before.removesuffix(_PYTHON_TAG)
                calls.append(call_of(value, text=text[match.start() : end], arguments=_KEYS))
                between = _BETWEEN.match(text, end)
                end = between.end() if between is not None else end
            else:
                said += text[position:end]
            position = end
        return said + text[position:], calls
