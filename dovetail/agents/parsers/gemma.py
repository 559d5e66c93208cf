"""Calls as call:name{key:value}, with strings between marks of their own: Gemma 4 and FunctionGemma."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dovetail.agents.parsers.base import SPACE_BEFORE, failed, types_of, value_of
from dovetail.agents.types import Schemas, ToolCall

_HEADER = re.compile(r"\s*(?:call)?:([\w.-]+)\s*(?=\{)")
_BARE = re.compile(r"[^,{}\[\]]+")
_THOUGHT = re.compile(r"<\|channel>(?:thought\n?)?(.*?)(?:<channel\|>|\Z)", re.DOTALL)


class Gemma4Parser:
    """`begin` and `end` are a call's, `quote` is on both sides of a string. Thinking comes in a channel."""

    begin, end, quote = "<|tool_call>", "<tool_call|>", '<|"|>'

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        thoughts = list(_THOUGHT.finditer(text))
        start = thoughts[-1].end() if thoughts else 0
        begin, end = re.escape(self.begin), re.escape(self.end)
        pattern = re.compile(rf"{SPACE_BEFORE}{begin}(.*?)(?:{end}|(?={begin})|\Z)", re.DOTALL)
        calls = [self._call(match.group(1), match.group().strip(), tools) for match in pattern.finditer(text, start)]
        thinking = _THOUGHT.sub(r"<think>\1</think>", text[:start])
        return thinking + pattern.sub("", text[start:]), calls

    def _call(self, body: str, text: str, tools: Schemas) -> ToolCall:
        header = _HEADER.match(body)
        if header is None:
            return failed(f"a call is {self.begin}call:name{{key:value}}{self.end}", text)
        name = header.group(1)
        try:
            arguments, at = self._value(body, header.end(), types_of(name, tools))
        except (ValueError, RecursionError) as error:
            return failed(f"the arguments cannot be read: {error}", text, name)
        if body[at:].strip():
            return failed(f"the arguments end before {body[at:].strip():.40}", text, name)
        return ToolCall(name, arguments, text=text)

    def _value(self, text: str, at: int, types: Any = ()) -> tuple[Any, int]:
        """The value that begins there, and where it ends. `types` are those of an object's keys, or the value's."""
        if text.startswith(self.quote, at):
            begin = at + len(self.quote)
            end = text.find(self.quote, begin)
            if end < 0:
                raise ValueError("a string is not closed")
            return text[begin:end], end + len(self.quote)
        if text.startswith(("{", "["), at):
            return self._several(text, at, types if isinstance(types, dict) else {})
        bare = _BARE.match(text, at)
        if bare is None:
            raise ValueError(f"there is no value at {text[at : at + 40]!r}")
        return value_of(bare.group().strip(), types), bare.end()

    def _several(self, text: str, at: int, types: dict[str, Any]) -> tuple[Any, int]:
        """An object or a list."""
        is_object = text[at] == "{"
        close = "}" if is_object else "]"
        entries: dict[Any, Any] = {}
        at = _space(text, at + 1)
        while not text.startswith(close, at):
            key: Any = len(entries)
            if is_object:
                key, at = self._key(text, at)
            entries[key], at = self._value(text, at, types.get(key, ()) if is_object else ())
            at = _space(text, at)
            if text.startswith(",", at):
                at = _space(text, at + 1)
            elif not text.startswith(close, at):
                raise ValueError(f"{close} is missing")
        return entries if is_object else list(entries.values()), at + 1

    def _key(self, text: str, at: int) -> tuple[str, int]:
        quote = re.escape(self.quote)
        key = re.compile(rf"(?:{quote}(.*?){quote}|([^\s:{{}}\[\],]+))\s*:\s*", re.DOTALL).match(text, at)
        if key is None:
            raise ValueError(f"there is no key at {text[at : at + 40]!r}")
        return key.group(1) if key.group(2) is None else key.group(2), key.end()


class FunctionGemmaParser(Gemma4Parser):
    """The same between other marks; every value is a string there, or looks like what it is."""

    begin, end, quote = "<start_function_call>", "<end_function_call>", "<escape>"


def _space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
