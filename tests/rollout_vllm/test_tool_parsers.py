"""Tool calls as vLLM's own parsers read them: what they call from the same text."""

from __future__ import annotations

import copy
import importlib
import json
from typing import Any

import pytest

from dovetail.agents.parsers import turn_parser
from tests.agents.test_parsers import (
    DEEPSEEK,
    DSML,
    DSML_CALL,
    FUNCTION_GEMMA_CALL,
    GEMMA_CALL,
    GLM_CALL,
    KIMI,
    KIMI_CALL,
    MINIMAX,
    MINIMAX_CALL,
    SEED_CALL,
    V3_CALL,
    V31_CALL,
)
from tests.agents.tokenizers import family_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("vllm")]

PROPERTIES = {"query": {"type": "string"}, "limit": {"type": "integer"}, "tags": {"type": "array"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("search", "open")
]
THINK = ("<think>", "</think>")
TAGS = tuple(f"<{end}{name}>" for name in ("tool_call", "arg_key", "arg_value") for end in ("", "/"))
V3_MARKS = tuple(f"<\uff5ctool▁{name}\uff5c>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
KIMI_MARKS = tuple(f"<|tool_call{name}|>" for name in ("s_section_begin", "s_section_end", "_begin", "_end"))
GEMMA_MARKS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
ESCAPES = ("<start_function_call>", "<end_function_call>", "<escape>")


def both(call: str) -> str:
    """Two calls in a row."""
    return f"{call}\n{call.replace('search', 'open')}"


@pytest.mark.parametrize(
    ("name", "theirs", "marks", "text"),
    [
        ("glm", "parser.glm47_moe:Glm47MoeParser", (*THINK, *TAGS), f"So.\n{both(GLM_CALL)}"),
        ("glm", "parser.glm47_moe:Glm47MoeParser", (*THINK, *TAGS), "<tool_call>search</tool_call>"),
        ("kimi", "parser.kimi_k2:KimiK2Parser", KIMI_MARKS, KIMI.format(KIMI_CALL)),
        (
            "deepseek",
            "tool_parsers.deepseekv3_tool_parser:DeepSeekV3ToolParser",
            V3_MARKS,
            DEEPSEEK.format(both(V3_CALL)),
        ),
        (
            "deepseek",
            "tool_parsers.deepseekv31_tool_parser:DeepSeekV31ToolParser",
            V3_MARKS,
            "So." + DEEPSEEK.format(V31_CALL),
        ),
        ("deepseek_v4", "parser.deepseek_v4:DeepSeekV4Parser", THINK, DSML.format(both(DSML_CALL))),
        ("minimax", "parser.minimax_m2:MinimaxM2Parser", THINK, MINIMAX.format(both(MINIMAX_CALL))),
        ("seed", "parser.seed_oss:SeedOssParser", (), both(SEED_CALL)),
        ("gemma4", "parser.gemma4:Gemma4Parser", GEMMA_MARKS, both(GEMMA_CALL)),
        (
            "gemma4",
            "parser.gemma4:Gemma4Parser",
            GEMMA_MARKS,
            GEMMA_CALL.replace("3}", '3,tags:[<|"|>a,b<|"|>,{x:<|"|>1<|"|>}]}'),
        ),
        (
            "functiongemma",
            "tool_parsers.functiongemma_tool_parser:FunctionGemmaToolParser",
            ESCAPES,
            FUNCTION_GEMMA_CALL.replace(",limit:3", ""),
        ),
    ],
)
def test_the_same_calls_are_read(name: str, theirs: str, marks: tuple[str, ...], text: str) -> None:
    from tokenizers import AddedToken
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tokenizer = copy.deepcopy(family_tokenizer("smollm2"))
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    message: Any = {"role": "user", "content": "hi"}
    request = ChatCompletionRequest(
        model="m", messages=[message], tools=TOOLS, chat_template_kwargs={"enable_thinking": False}
    )
    module, _, cls = theirs.partition(":")
    kind = getattr(importlib.import_module(f"vllm.{module}"), cls)
    options = {"chat_template_kwargs": {"enable_thinking": False}} if module.startswith("parser") else {}
    read = kind(tokenizer, request.tools, **options).extract_tool_calls(text, request)
    wanted = [(call.function.name, json.loads(call.function.arguments)) for call in read.tool_calls]
    said, calls = turn_parser(name, tokenizer)(tokenizer.encode(text), TOOLS)
    assert wanted
    assert [(call.name, call.arguments) for call in calls] == wanted
    assert said == (read.content or "").strip()
