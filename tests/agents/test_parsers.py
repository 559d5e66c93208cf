"""Outputs as the model families write them, whole and broken, to text and calls."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dovetail.agents.parsers import PARSERS, register_parser, turn_parser
from dovetail.agents.types import ToolCall
from tests.agents.tokenizers import family_tokenizer

pytestmark = pytest.mark.unit

SEARCH = {"name": "search", "arguments": {"query": "dovetail joint", "limit": 3}}
FAMILY = {"hermes": "qwen2.5", "llama3_json": "llama3", "qwen3_coder": "qwen3", "gpt-oss": "gpt-oss", "text": "glm"}
FAMILY |= {"glm": "glm", "deepseek": "deepseek-r1", "gemma4": "gemma", "functiongemma": "gemma"}


def parse(name: str, text: str, tools: Any = ()) -> tuple[str, list[ToolCall]]:
    tokenizer = family_tokenizer(FAMILY.get(name, "qwen3"))
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
GLM_CALL = (
    "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>dovetail joint</arg_value>\n"
    "<arg_key>limit</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
KIMI_CALL = (
    '<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "dovetail joint", "limit": 3}'
    "<|tool_call_end|>"
)
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
V3_CALL = (
    "<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>search\n```json\n"
    '{"query": "dovetail joint", "limit": 3}\n```<\uff5ctool▁call▁end\uff5c>'
)
V31_CALL = V3_CALL.replace("function<", "search<").replace(">search\n```json\n", ">").replace("\n```", "")
DEEPSEEK = "<\uff5ctool▁calls▁begin\uff5c>{}<\uff5ctool▁calls▁end\uff5c>"
MINIMAX_CALL = (
    '<invoke name="search">\n<parameter name="query">dovetail joint</parameter>\n'
    '<parameter name="limit">3</parameter>\n</invoke>'
)
MINIMAX = "<minimax:tool_call>\n{}\n</minimax:tool_call>"
DSML_CALL = (
    '<@invoke name="search">\n<@parameter name="query" string="true">dovetail joint</@parameter>\n'
    '<@parameter name="limit" string="false">3</@parameter>\n</@invoke>'
).replace("@", "\uff5cDSML\uff5c")
DSML = "<@tool_calls>\n{}\n</@tool_calls>".replace("@", "\uff5cDSML\uff5c")
SEED_CALL = CODER_CALL.replace("tool_call>", "seed:tool_call>")
GEMMA_CALL = '<|tool_call>call:search{query:<|"|>dovetail joint<|"|>,limit:3}<tool_call|>'
FUNCTION_GEMMA_CALL = (
    "<start_function_call>call:search{query:<escape>dovetail joint<escape>,limit:3}<end_function_call>"
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
        ("glm", GLM_CALL, ""),
        ("glm", GLM_CALL.replace("\n", ""), ""),
        ("glm", f"I will search.\n{GLM_CALL}", "I will search."),
        ("glm", f"<think>\nI could write {GLM_CALL}\n</think>\n\nSo.\n{GLM_CALL}", None),
        ("kimi", KIMI.format(KIMI_CALL), ""),
        ("kimi", f"I will search. {KIMI.format(KIMI_CALL)}", "I will search."),
        ("kimi", KIMI.format(KIMI_CALL).removesuffix("<|tool_call_end|><|tool_calls_section_end|>"), ""),
        ("deepseek", DEEPSEEK.format(V3_CALL), ""),
        ("deepseek", DEEPSEEK.format(V31_CALL), ""),
        ("deepseek", f"I will search.\n{DEEPSEEK.format(V31_CALL)}", "I will search."),
        ("deepseek", DEEPSEEK.format(V3_CALL).split("\n```<")[0], ""),
        ("deepseek_v4", f"I will search.\n\n{DSML.format(DSML_CALL)}", "I will search."),
        ("deepseek_v4", DSML.format(DSML_CALL).replace("tool_calls", "function_calls"), ""),
        ("minimax", MINIMAX.format(MINIMAX_CALL), ""),
        ("minimax", f"I will search.\n{MINIMAX.format(MINIMAX_CALL)}", "I will search."),
        ("minimax", MINIMAX.format(MINIMAX_CALL).replace('"', "'"), ""),
        ("minimax", MINIMAX_CALL, ""),
        ("seed", SEED_CALL, ""),
        ("seed", f"I will search.\n{SEED_CALL}", "I will search."),
        ("gemma4", GEMMA_CALL, ""),
        ("gemma4", f"I will search.{GEMMA_CALL}", "I will search."),
        ("gemma4", f"<|channel>thought\nLook it up.<channel|>{GEMMA_CALL}", "<think>Look it up.</think>"),
        ("gemma4", GEMMA_CALL.replace("call:", ":").replace("<tool_:|>", "<tool_call|>"), ""),
        ("functiongemma", FUNCTION_GEMMA_CALL, ""),
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
        ("glm", f"{GLM_CALL}\n{GLM_CALL.replace('search', 'open')}"),
        ("glm", f"{GLM_CALL.removesuffix('</tool_call>')}{GLM_CALL.replace('search', 'open')}"),
        ("kimi", KIMI.format(KIMI_CALL + KIMI_CALL.replace("search:0", "open:1"))),
        ("kimi", KIMI.format(KIMI_CALL.removesuffix("<|tool_call_end|>") + KIMI_CALL.replace("search:0", "open:1"))),
        ("deepseek", DEEPSEEK.format(f"{V3_CALL}\n{V3_CALL.replace('search', 'open')}")),
        ("deepseek", DEEPSEEK.format(V31_CALL + V31_CALL.replace("search", "open"))),
        ("deepseek_v4", DSML.format(f"{DSML_CALL}\n{DSML_CALL.replace('search', 'open')}")),
        ("minimax", MINIMAX.format(f"{MINIMAX_CALL}\n{MINIMAX_CALL.replace('search', 'open')}")),
        ("seed", f"{SEED_CALL}\n{SEED_CALL.replace('search', 'open')}"),
        ("gemma4", GEMMA_CALL + GEMMA_CALL.replace("search", "open")),
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
        ("glm", GLM_CALL.removesuffix("</arg_value>\n</tool_call>"), "search", "does not go on at <arg_key>limit"),
        ("glm", '<tool_call>{"name": "search"}</tool_call>', "", "a call needs a name"),
        ("glm", "<tool_call>\n", "", "a call needs a name"),
        ("kimi", KIMI.format(KIMI_CALL.replace("3}", "3")), "search", "not valid JSON"),
        ("kimi", KIMI.format("<|tool_call_begin|>search<|tool_call_end|>"), "", "needs an id"),
        ("deepseek", DEEPSEEK.format(V3_CALL.replace("3}", "3")), "search", "not valid JSON"),
        ("deepseek", DEEPSEEK.format(V31_CALL.replace("3}", "3")), "search", "not valid JSON"),
        ("deepseek", DEEPSEEK.format("<\uff5ctool▁call▁begin\uff5c>search"), "", "a call needs its name and"),
        ("deepseek_v4", DSML.format(DSML_CALL.split("</")[0]).split("\n</")[0], "search", "query is not closed"),
        ("minimax", MINIMAX.format("search"), "", "<invoke name="),
        ("minimax", MINIMAX.format('<invoke name="">x</invoke>'), "", "a call needs a name"),
        ("seed", "<seed:tool_call>\n<function=search>\n<parameter=q>\ndo", "search", "<parameter=q> is not closed"),
        ("gemma4", GEMMA_CALL.split(",")[0].removesuffix('<|"|>'), "search", "a string is not closed"),
        ("gemma4", GEMMA_CALL.replace("}", ""), "search", "} is missing"),
        ("gemma4", GEMMA_CALL.replace("limit:", ""), "search", "there is no key"),
        ("gemma4", "<|tool_call>search<tool_call|>", "", "a call is <|tool_call>call:name"),
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
        ("glm", "<think>\nMaybe <tool_call>", "<think>\nMaybe <tool_call>"),
        ("seed", "<seed:think>\nMaybe <seed:tool_call>", "<seed:think>\nMaybe <seed:tool_call>"),
        ("gemma4", "<|channel>thought\nMaybe <|tool_call>", "<think>Maybe <|tool_call></think>"),
        ("kimi", "42", "42"),
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


@pytest.mark.parametrize(
    "kind",
    [
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "string", "nullable": True},  # what `@tool` makes of `str | None`
    ],
)
def test_a_string_that_may_be_null_is_a_string_or_null(kind: dict[str, Any]) -> None:
    schema = {"name": "run", "parameters": {"properties": dict.fromkeys(("zip", "none"), kind)}}
    written = "".join(f"<parameter={key}>{text}</parameter>" for key, text in [("zip", "1234"), ("none", "null")])
    _, calls = parse("qwen3_coder", f"<tool_call><function=run>{written}</function></tool_call>", [schema])
    assert calls[0].arguments == {"zip": "1234", "none": None}


def test_a_value_of_several_types_is_what_it_looks_like() -> None:
    schema = {"name": "run", "parameters": {"properties": {"at": {"type": ["string", "integer"]}}}}
    call = "<tool_call><function=run><parameter=at>{}</parameter></function></tool_call>"
    found = [parse("qwen3_coder", call.format(text), [schema])[1][0].arguments["at"] for text in ("12", "null", "a")]
    assert found == [12, None, "a"]


@pytest.mark.parametrize("kind", [{"type": 5}, {"anyOf": 5}, {"oneOf": {"type": "string"}}])
def test_a_schema_that_is_none_says_nothing_of_its_values(kind: dict[str, Any]) -> None:
    schema = {"name": "run", "parameters": {"properties": {"at": kind}}}
    text = "<tool_call><function=run><parameter=at>12</parameter></function></tool_call>"
    assert parse("qwen3_coder", text, [schema])[1][0].arguments == {"at": 12}


@pytest.mark.parametrize("name", ["glm", "minimax", "seed", "gemma4"])
def test_values_have_the_types_of_the_schema(name: str) -> None:
    kinds = {"code": "string", "lines": "array", "fast": "boolean"}
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    schema = {"type": "function", "function": {"name": "run", "parameters": {"properties": properties}}}
    parameters = {"code": "12", "lines": "[1, 2]", "fast": "true", "other": "7"}
    begin, one, end = {
        "glm": ("<tool_call>run", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", "</tool_call>"),
        "minimax": ("<invoke name=run>", "<parameter name={}>{}</parameter>", "</invoke>"),
        "seed": ("<seed:tool_call><function=run>", "<parameter={}>{}</parameter>", "</function></seed:tool_call>"),
        "gemma4": ("<|tool_call>call:run{", "{}:{},", "}<tool_call|>"),
    }[name]
    _, calls = parse(name, begin + "".join(one.format(*pair) for pair in parameters.items()) + end, [schema])
    assert calls[0].arguments == {"code": "12", "lines": [1, 2], "fast": True, "other": 7}


def test_gemmas_values_may_hold_values() -> None:
    written = '<|tool_call>call:f{a:{<|"|>b c<|"|>:[<|"|>x},]<|"|>, true, {}]},d:null, e:two words}<tool_call|>'
    assert parse("gemma4", written)[1][0].arguments == {"a": {"b c": ["x},]", True, {}]}, "d": None, "e": "two words"}


def test_special_tokens_that_are_no_markup_leave_the_text() -> None:
    assert parse("hermes", "<|im_start|>hello<|im_end|>") == ("hello", [])


def test_half_a_character_in_an_argument_becomes_a_question_mark() -> None:
    written = r'<tool_call>{"name": "f", "arguments": {"x": ["a\ud800b", "\ud83d\ude00"]}}</tool_call>'
    assert parse("hermes", written)[1][0].arguments == {"x": ["a?b", "\N{GRINNING FACE}"]}


ENDLESS = {
    "spaces": " ",
    "lines": "\n",
    "tags": "<tool_call>",
    "headers": "<|channel|>",
    "functions": "<function=",
    "invocations": '<invoke name="',
    "values": "<arg_key>a</arg_key><arg_value>",
}


@pytest.mark.parametrize("name", [name for name in PARSERS if name != "text"])
@pytest.mark.parametrize("repeated", ENDLESS)
def test_a_turn_that_repeats_itself_to_the_end_is_read_at_once(name: str, repeated: str) -> None:
    # 8 s and more where a parser looks from each character to the end, and no other trajectory goes on meanwhile.
    text = ENDLESS[repeated] * (40_000 // len(ENDLESS[repeated]))
    began = time.process_time()
    PARSERS[name]().parse((), f"<tool_call>f{text}" if repeated == "values" else text)
    assert time.process_time() - began < 2


def test_calls_side_by_side_keep_their_spaces_to_themselves() -> None:
    written = (
        'a  <tool_call>{"name": "f"} \n <tool_call>{"name": "g"}</tool_call>\n\n<tool_call>{"name": "h"}</tool_call> b'
    )
    said, calls = parse("hermes", written)
    assert [call.name for call in calls] == ["f", "g", "h"]
    assert said == "a b"


def test_users_register_formats_and_unknown_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.agents.parsers.PARSERS", PARSERS | {})

    @register_parser("shout")
    class Shout:
        def parse(self, token_ids: Any, text: str, tools: Any = ()) -> tuple[str, list[ToolCall]]:
            return "", [ToolCall(text, {})]

    tokenizer = family_tokenizer("smollm2")
    assert turn_parser("shout", tokenizer)(tokenizer.encode("HEY"))[1] == [ToolCall("HEY", {})]
    with pytest.raises(ValueError, match=r"multi_turn\.format=xml is not known\. Use one of hermes"):
        turn_parser("xml", tokenizer)
