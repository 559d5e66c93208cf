"""Harmony: messages in channels, calls addressed to functions: gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dovetail.agents.parsers.base import arguments_of
from dovetail.agents.types import Schemas, ToolCall

# The generation prompt ends inside a header, so the first one may begin anywhere in it.
_MESSAGE = re.compile(
    r"(?P<header>.*?)<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)", re.DOTALL
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


class GptOssParser:
    """`analysis` is thinking, `final` and remarks in `commentary` are what was said, the rest are calls."""

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        thinking: list[str] = []
        said: list[str] = []
        calls: list[ToolCall] = []
        end = 0
        while (match := _MESSAGE.match(text, end)) is not None:
            end = match.end()
            header, body = match.group("header"), match.group("body")
            channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
            if recipient is not None:
                calls.append(arguments_of(body, recipient.group(1), match.group().strip()))
            elif channel is not None and channel.group(1) == "analysis":
                thinking.append(body.strip())
            else:
                said.append(body)
        said.append(text[end:])
        thought = "\n".join(thinking)
        return (f"<think>{thought}</think>" if thought else "") + "\n".join(part for part in said if part), calls
