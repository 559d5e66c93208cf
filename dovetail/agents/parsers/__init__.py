"""Sampled ids to what was said and which tools were called, by the names that `multi_turn.format` has in verl."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dovetail.agents.parsers.base import Parser
from dovetail.agents.parsers.deepseek import DeepSeekParser
from dovetail.agents.parsers.gemma import FunctionGemmaParser, Gemma4Parser
from dovetail.agents.parsers.glm import GlmParser
from dovetail.agents.parsers.gpt_oss import GptOssParser
from dovetail.agents.parsers.hermes import HermesParser
from dovetail.agents.parsers.invoke import DsmlParser, InvokeParser
from dovetail.agents.parsers.kimi import KimiParser
from dovetail.agents.parsers.llama3_json import Llama3JsonParser
from dovetail.agents.parsers.qwen3_coder import Qwen3CoderParser, SeedParser
from dovetail.agents.tools.schema import ToolError
from dovetail.agents.types import Schemas, ToolCall
from dovetail.config.wording import did_you_mean

__all__ = ["PARSERS", "Parser", "find_parser", "register_parser", "turn_parser"]


class TextParser:
    """For tasks without tools: finds no calls."""

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        return text, []


PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": Llama3JsonParser,
    "qwen3_coder": Qwen3CoderParser,
    "gpt-oss": GptOssParser,
    "glm": GlmParser,
    "kimi": KimiParser,
    "deepseek": DeepSeekParser,
    "deepseek_v4": DsmlParser,
    "minimax": InvokeParser,
    "seed": SeedParser,
    "gemma4": Gemma4Parser,
    "functiongemma": FunctionGemmaParser,
    "text": TextParser,
}


def register_parser(name: str) -> Callable[[type], type]:
    """A decorator for a class with `parse`: `multi_turn.format=name` then takes it."""

    def register(parser: type) -> type:
        PARSERS[name] = parser
        return parser

    return register


def find_parser(name: str) -> Callable[[], Parser]:
    """What makes the parser of a format."""
    if name not in PARSERS:
        hint = did_you_mean(name, PARSERS)
        raise ToolError(f"multi_turn.format={name} is not known.{hint} Use one of {', '.join(PARSERS)}.")
    return PARSERS[name]


def turn_parser(name: str, tokenizer: Any) -> Callable[..., tuple[str, list[ToolCall]]]:
    """`parse(ids, tools=())` of this format: ids of a turn without its stop token to text and calls."""
    parser = find_parser(name)()
    special = {
        str(token) for token in tokenizer.added_tokens_decoder.values() if token.special and "think>" not in str(token)
    }
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def parse(ids: Sequence[int], tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        said, calls = parser.parse(ids, tokenizer.decode(list(ids), skip_special_tokens=False), tools)
        said = pattern.sub("", said)
        return (said.strip() if calls else said), [replace(call, arguments=_valid(call.arguments)) for call in calls]

    return parse


def _valid(arguments: Any) -> Any:
    r"""JSON can name half a character (`\ud800`), which neither a tokenizer nor a file takes: it becomes `?`."""
    return json.loads(json.dumps(arguments, ensure_ascii=False).encode(errors="replace"))
