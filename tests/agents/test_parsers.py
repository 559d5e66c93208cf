"""Outputs as the model families write them, whole and broken, to text and calls."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.agents.parsers import PARSERS, register_parser, turn_parser
from dovetail.agents.types import ToolCall
from tests.agents.tokenizers import family_tokenizer

pytestmark = pytest.mark.unit

SEARCH = {"name": "search", "arguments": {"query": "dovetail joint", "limit": 3}}
FAMILY = {"hermes": "qwen2.5", "llama3_json": "llama3", "qwen3_coder": "qwen3", "gpt-oss": "gpt-oss", "text": "glm"}


def parse(name: str, text: str, tools: Any = ()) -> tuple[str, list[ToolCall]]:
    tokenizer = family_tokenizer(FAMILY[name])
    return turn_parser(name, tokenizer)(tokenizer.encode(text), tools)


def named(calls: list[ToolCall]) -> list[tuple[str, dict[str, Any] | None]]:
    return [(call.name, call.arguments) for call in calls]


HERMES_CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "dovetail joint", "limit": 3}}\n</tool_call>'
LLAMA_CALL = '{"name": "search", "parameters": {"query": "dovetail joint", "limit": 3}}'
CODER_CALL = (
    "<tool_call>\n<function=search>\n<parameter=query>\ndovetail joint\n</parameter>\n"
    "<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>"
)
OSS_CALL = (
    "<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
    '{"query": "dovetail joint", "limit": 3}<|call|>'
)
OSS_HEADER_CALL = (
    " to=functions.search<|channel|>commentary json<|message|>" + '{"query": "dovetail joint", "limit": 3}'
)
OSS_THOUGHT = "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("hermes", HERMES_CALL, ""),
        ("hermes", f"I will search.\n{HERMES_CALL}", "I will search."),
        ("hermes", f"<think>\nI could write {HERMES_CALL}\n</think>\n\nSo.\n{HERMES_CALL}", None),
        ("hermes", HERMES_CALL.removesuffix("\n</tool_call>"), ""),
        ("hermes", f"{HERMES_CALL}\nThen I wait.", "Then I wait."),
        ("llama3_json", LLAMA_CALL, ""),
        ("llama3_json", f"<|python_tag|>{LLAMA_CALL}", ""),
        ("llama3_json", f"I will search. {LLAMA_CALL} Then I wait.", "I will search. Then I wait."),
        ("llama3_json", LLAMA_CALL.replace('{"name"', '{"type": "function", "name"'), ""),
        ("qwen3_coder", CODER_CALL, ""),
        ("qwen3_coder", f"I will search.\n\n{CODER_CALL}", "I will search."),
        ("qwen3_coder", CODER_CALL.replace("<tool_call>\n", "").replace("\n</tool_call>", ""), ""),
        ("gpt-oss", OSS_CALL, ""),
        ("gpt-oss", OSS_HEADER_CALL, ""),
        ("gpt-oss", OSS_THOUGHT + OSS_CALL, "<think>Look it up.</think>"),
        (
            "gpt-oss",
            "<|channel|>commentary<|message|>I will search.<|end|><|start|>assistant" + OSS_CALL,
            "I will search.",
        ),
    ],
)
def test_a_call_is_read_with_the_text_around_it(name: str, text: str, said: str | None) -> None:
    content, calls = parse(name, text)
    assert named(calls) == [("search", SEARCH["arguments"])]
    assert calls[0].error == ""
    if said is not None:
        assert content == said
    else:  # the call in the thinking stays a thought
        assert content.startswith("<think>\nI could write <tool_call>")
        assert content.endswith("</think>\n\nSo.")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"{HERMES_CALL}\n{HERMES_CALL.replace('search', 'open')}"),
        ("hermes", f"{HERMES_CALL.removesuffix('</tool_call>')}{HERMES_CALL.replace('search', 'open')}"),
        ("llama3_json", f"{LLAMA_CALL}; {LLAMA_CALL.replace('search', 'open')}"),
        ("qwen3_coder", f"{CODER_CALL}\n{CODER_CALL.replace('search', 'open')}"),
        ("gpt-oss", f"{OSS_CALL}<|start|>assistant{OSS_CALL.replace('search', 'open')}"),
    ],
)
def test_parallel_calls_keep_their_order(name: str, text: str) -> None:
    content, calls = parse(name, text)
    assert named(calls) == [("search", SEARCH["arguments"]), ("open", SEARCH["arguments"])]
    assert content == ""


def test_a_list_in_one_tag_are_several_calls() -> None:
    _, calls = parse("hermes", '<tool_call>[{"name": "a", "arguments": {}}, {"name": "b"}]</tool_call>')
    assert named(calls) == [("a", {}), ("b", {})]


@pytest.mark.parametrize(
    ("name", "text", "called", "error"),
    [
        ("hermes", '<tool_call>\n{"name": "search", "arguments": {"q": }}\n</tool_call>', "search", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"q": "do', "search", "not valid JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "", "a name and arguments"),
        ("hermes", '<tool_call>{"name": "search", "arguments": [1]}</tool_call>', "search", "[1], not an object"),
        ("hermes", '<tool_call>{"name": "search", "arguments": "{"}</tool_call>', "search", "not valid JSON"),
        ("hermes", "<tool_call>", "", "not valid JSON"),
        ("llama3_json", '{"name": "search", "parameters": {"q": "do', "search", "not valid JSON"),
        ("llama3_json", '<|python_tag|>{"name": "search", "parameters": 3}', "search", "3, not an object"),
        ("qwen3_coder", "<tool_call>\n<function=search>\n<parameter=q>\ndo", "search", "<parameter=q> is not closed"),
        ("qwen3_coder", "<tool_call>\nsearch\n</tool_call>", "", "<function=name>"),
        ("gpt-oss", OSS_CALL.replace("3}", "3"), "search", "not valid JSON"),
        ("gpt-oss", "<|channel|>commentary to=functions.search<|message|>[]<|call|>", "search", "not an object"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(name: str, text: str, called: str, error: str) -> None:
    _, calls = parse(name, text)
    assert [(call.name, call.arguments) for call in calls] == [(called, None)]
    assert error in calls[0].error
    assert calls[0].text


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("hermes", "The answer is {42}.", "The answer is {42}."),
        ("hermes", "<think>\nMaybe <tool_call>", "<think>\nMaybe <tool_call>"),
        ("llama3_json", 'As JSON: {"name": "Ada"}', 'As JSON: {"name": "Ada"}'),
        ("llama3_json", 'It breaks off: {"name": "Ada", "par', 'It breaks off: {"name": "Ada", "par'),
        ("gpt-oss", "<|channel|>final<|message|>42<|return|>", "42"),
        ("gpt-oss", OSS_THOUGHT + "<|channel|>final<|message|>42", "<think>Look it up.</think>42"),
        ("gpt-oss", "no channel at all", "no channel at all"),
        ("text", HERMES_CALL, HERMES_CALL),
    ],
)
def test_text_without_calls_stays_as_it_is(name: str, text: str, said: str) -> None:
    assert parse(name, text) == (said, [])


def test_qwen3_coders_values_have_the_types_of_the_schema() -> None:
    kinds = {"code": "string", "lines": "array", "fast": "boolean"}
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    schema = {"type": "function", "function": {"name": "run", "parameters": {"properties": properties}}}
    parameters = {"code": "12\n\n34", "lines": "[1, 2]", "fast": "True", "other": "7"}
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    _, calls = parse("qwen3_coder", f"<tool_call>\n<function=run>\n{written}</function>\n</tool_call>", [schema])
    assert calls[0].arguments == {"code": "12\n\n34", "lines": [1, 2], "fast": True, "other": 7}


def test_special_tokens_that_are_no_markup_leave_the_text() -> None:
    assert parse("hermes", "<|im_start|>hello<|im_end|>") == ("hello", [])


def test_half_a_character_in_an_argument_becomes_a_question_mark() -> None:
    written = r'<tool_call>{"name": "f", "arguments": {"x": ["a\ud800b", "\ud83d\ude00"]}}</tool_call>'
    assert parse("hermes", written)[1][0].arguments == {"x": ["a?b", "\N{GRINNING FACE}"]}


def test_users_register_formats_and_unknown_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.agents.parsers.PARSERS", PARSERS | {})

    @register_parser("shout")
    class Shout:
        def parse(self, token_ids: Any, text: str, tools: Any = ()) -> tuple[str, list[ToolCall]]:
            return "", [ToolCall(text, {})]

    tokenizer = family_tokenizer("smollm2")
    assert turn_parser("shout", tokenizer)(tokenizer.encode("HEY"))[1] == [ToolCall("HEY", {})]
    with pytest.raises(ValueError, match=r"multi_turn\.format=glm is not known; use one of hermes"):
        turn_parser("glm", tokenizer)
