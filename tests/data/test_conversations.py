"""Conversations as token rows: what is trained, what is only read, what is refused."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest

from dovetail.agents.chat import ChatRenderer, ChatTemplateError
from dovetail.agents.template_audit import TOOL, audited_conversations
from dovetail.config.data import DataConfig
from dovetail.config.methods import SFTConfig
from dovetail.data.conversations import ConversationDataset, TokenRow, conversation_rows
from dovetail.data.errors import DataError
from dovetail.data.files import ListRows, write_rows
from tests.agents.tokenizers import FAMILIES, family_tokenizer

pytestmark = pytest.mark.unit

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The results?"},
    {"role": "assistant", "content": "<think>\nTwo calls.\n</think>\n\nThe answer is 42."},
    {"role": "user", "content": "And <|im_end|> the tool?"},
    {"role": "assistant", "content": "It says 7."},
]


def opened(rows: list[dict[str, Any]], family: str | None = "qwen2.5", sft: Any = None, **data: Any) -> Any:
    """A data set of these rows; without a family, of a tokenizer without a template."""
    tokenizer = family_tokenizer(family or "qwen2.5")
    renderer = None if family is None else ChatRenderer(tokenizer)
    config = DataConfig(**{"max_length": 4096, **data})
    return ConversationDataset([ListRows("rows", "0", rows)], tokenizer, renderer, config, sft=SFTConfig(**(sft or {})))


def trained_text(family: str, row: TokenRow) -> str:
    return family_tokenizer(family).decode([token for token, own in zip(row.ids, row.mask, strict=True) if own])


def test_only_answers_and_the_token_that_ends_them_are_trained() -> None:
    (row,) = opened([{"messages": TALK}])[0]
    rendered = family_tokenizer("qwen2.5").apply_chat_template(TALK, tokenize=False)
    # All that the template writes, but the line break after the last answer, which nobody samples.
    assert family_tokenizer("qwen2.5").decode(row.ids) == rendered.rstrip("\n")
    assert trained_text("qwen2.5", row) == f"{TALK[2]['content']}<|im_end|>{TALK[4]['content']}<|im_end|>"


def test_parts_that_are_all_text_are_the_text() -> None:
    texts = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in texts]
    made = opened([{"messages": texts}, {"messages": parts}], "llama3")
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": ["red.png"]}, "row 0: it has images or videos, and the model has no processor"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "red"}]},
            "row 0: it has images or videos, and the model has no processor",
        ),
    ],
)
def test_images_are_not_left_out_of_conversations_in_silence(changes: dict[str, Any], message: str) -> None:
    conversation = [{"role": "user", "content": "<image> what"}, {"role": "assistant", "content": "red"}]
    with pytest.raises(DataError, match=message):
        opened([{"messages": conversation} | changes])


def test_a_template_that_rewrites_the_history_makes_a_row_of_what_follows() -> None:
    first, second = opened([{"messages": TALK}], "qwen3")[0]
    tokenizer = family_tokenizer("qwen3")
    assert trained_text("qwen3", first).count("Two calls.") == 1
    assert "It says 7." not in tokenizer.decode(first.ids)
    # Qwen3 drops the thinking of earlier turns: that is what the model sees when it is asked again.
    assert "Two calls." not in tokenizer.decode(second.ids)
    asked = ChatRenderer(tokenizer).start(TALK[:4])
    assert second.ids[: len(asked)] == asked
    assert second.mask[: len(asked)] == [0] * len(asked)
    assert trained_text("qwen3", second).endswith("It says 7.<|im_end|>")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_of_every_family_is_trained_once_and_stands_as_when_it_was_asked_for(family: str) -> None:
    """Also calls of tools, results and thinking: the cases of the template audit."""
    chat, tokenizer = ChatRenderer(family_tokenizer(family)), family_tokenizer(family)
    refused: set[str] = set()
    for name, conversations in audited_conversations().items():
        messages = [*conversations[0][0], *conversations[0][1], {"role": "assistant", "content": "quartz ends it"}]
        tools = [TOOL] if "call" in name or "tool" in name else None
        try:
            rows = list(conversation_rows(chat, messages, tools))
        except ChatTemplateError:
            refused.add(name)
            continue
        together = "".join(trained_text(family, row) for row in rows)
        assert together.count("quartz ends it") == 1, name
        assert sum(tokenizer.decode(row.ids).count("quartz ends it") for row in rows) == 1, name
        assert "Name a word." not in together, name
        assert "found" not in together.replace("look_up", ""), name
    assert refused == {case.name for case in chat.audit.failures("accepted")}


def test_prompt_and_response_may_be_text_messages_or_inside_a_dict() -> None:
    plain = opened([{"prompt": "Two?", "response": "2"}])[0]
    listed = opened([{"prompt": [{"role": "user", "content": "Two?"}], "response": "2"}])[0]
    of_trl = opened([{"prompt": "Two?", "completion": [{"role": "assistant", "content": "2"}]}])[0]
    inside = opened(
        [{"extra_info": {"question": "Two?", "answer": "2"}}],
        prompt_key="extra_info",
        sft={"response_key": "extra_info", "prompt_dict_keys": ["question"], "response_dict_keys": ["answer"]},
    )[0]
    assert plain == listed == of_trl == inside
    assert trained_text("qwen2.5", plain[0]) == "2<|im_end|>"


def test_without_a_template_a_response_follows_its_prompt_and_is_closed() -> None:
    (row,) = opened([{"prompt": "Two?", "response": " 2"}], None)[0]
    tokenizer = family_tokenizer("qwen2.5")
    assert tokenizer.decode(row.ids) == "Two? 2<|im_end|>"
    assert trained_text("qwen2.5", row) == " 2<|im_end|>"
    with pytest.raises(DataError, match="no chat template"):
        opened([{"messages": TALK}], None)


def test_tools_are_shown_and_an_answer_of_weight_0_is_only_read() -> None:
    ((row,),) = opened([{"messages": [*TALK[:2], {**TALK[2], "weight": 0}, *TALK[3:]], "tools": [TOOL]}])
    text = family_tokenizer("qwen2.5").decode(row.ids)
    assert "look_up" in text
    assert "Two calls." in text
    assert trained_text("qwen2.5", row) == "It says 7.<|im_end|>"


def test_calls_and_schemas_of_a_parquet_file_have_the_keys_that_were_written(tmp_path: Path) -> None:
    """Arrow gives each call the arguments of all calls, and each schema the parameters of all."""

    def row(name: str, key: str) -> dict[str, Any]:
        call = {"role": "assistant", "content": "", "tool_calls": [_call(name, {key: "1"})]}
        parameters = {"type": "object", "properties": {key: {"type": "string"}}}
        tool = {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
        return {"messages": [*TALK[:2], call], "tools": [tool]}

    rows = [row("weather", "city"), row("sum", "terms")]
    tokenizer, config = family_tokenizer("qwen2.5"), DataConfig(max_length=4096)
    files = [str(write_rows(rows, tmp_path / f"rows{ending}")) for ending in (".jsonl", ".parquet")]
    written, arrow = (
        ConversationDataset([file], tokenizer, ChatRenderer(tokenizer), config, sft=SFTConfig()) for file in files
    )
    assert [written[number] for number in range(2)] == [arrow[number] for number in range(2)]
    assert "city" not in tokenizer.decode(arrow[1][0].ids)


def _call(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_each_row_says_whether_the_model_may_think() -> None:
    """The empty thought is the prompt's where thinking is off, and the answer's own where it is on."""
    talk = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    flags: list[dict[str, Any]] = [{"enable_thinking": flag} for flag in (False, True, None)]
    rows = opened([{**talk, **flag} for flag in flags] + [talk], "qwen3")
    prompts = [family_tokenizer("qwen3").decode(rows[number][0].first_answer()[0]) for number in range(4)]
    empty = "<think>\n\n</think>\n\n"
    assert [prompt.endswith(empty) for prompt in prompts] == [True, False, False, False]
    assert [trained_text("qwen3", rows[number][0]) for number in range(2)] == ["4<|im_end|>", f"{empty}4<|im_end|>"]
    assert rows[0][0].ids == rows[1][0].ids
    assert rows.ignores_thinking is False
    open_rows = opened([{**talk, **flag} for flag in flags], "qwen3", sft={"enable_thinking_default": False})
    assert [open_rows[number] == rows[0] for number in range(3)] == [True, False, True]
    named = opened([{**talk, "thinks": False}], "qwen3", sft={"enable_thinking_key": "thinks"})
    assert named[0] == rows[0]


def test_a_flag_of_thinking_that_is_none_or_changes_nothing_is_named() -> None:
    talk = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    with pytest.raises(DataError, match="row 0: enable_thinking is 'yes'; it must be true, false or null"):
        opened([{**talk, "enable_thinking": "yes"}], "qwen3")
    assert opened([{**talk, "enable_thinking": True}], "qwen2.5").ignores_thinking is True
    assert opened([{"prompt": "a", "response": "b", "enable_thinking": True}], None).ignores_thinking is True
    assert opened([talk], "qwen3").ignores_thinking is None


def test_a_template_that_shows_no_tools_is_noticed() -> None:
    row = {"messages": TALK, "tools": [TOOL]}
    assert opened([row, row]).hides_tools is False
    assert opened([{"messages": TALK}]).hides_tools is None
    tokenizer = copy.deepcopy(family_tokenizer("qwen2.5"))
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    data = [ListRows("rows", "0", [row, row])]
    renderer, sft = ChatRenderer(tokenizer), SFTConfig()
    assert ConversationDataset(data, tokenizer, renderer, DataConfig(max_length=4096), sft=sft).hides_tools is True


def test_a_template_that_drops_the_text_beside_a_call_is_noticed() -> None:
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "a"}}}
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    plain = {"messages": [talk[0], {**talk[1], "content": ""}]}
    rows = [{"messages": TALK}, plain, {"messages": talk}]
    assert opened(rows, "llama3").drops_text is True
    assert opened(rows, "qwen2.5").drops_text is False
    assert opened(rows[:2], "llama3").drops_text is None


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no columns": ({"text": "hi"}, "neither 'messages' nor both of 'prompt' and 'response', only text;"),
    "no answer": ({"messages": TALK[:2]}, "one of the assistant is what is trained"),
    "no user": ({"messages": TALK[2:]}, "it begins with the assistant; put a message of the user"),
    "empty": ({"messages": None}, "only empty columns"),
    "nothing to train": ({"messages": [*TALK[:2], {**TALK[2], "weight": 0}]}, "message of the assistant has weight 0"),
    "a string": ({"messages": "hi"}, "must be a list of messages"),
    "no role": ({"messages": [{"content": "hi"}]}, "must be a list of messages"),
    "tools": ({"messages": TALK, "tools": "{"}, "tools is not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_with_its_number_and_its_reason(name: str) -> None:
    row, reason = BAD[name]
    with pytest.raises(DataError, match=r"1 row cannot be used:\n  rows row 1: (.|\n)*skip_bad_rows") as error:
        opened([{"messages": TALK}, row])
    assert reason in str(error.value)
    kept = opened([{"messages": TALK}, row], skip_bad_rows=True)
    assert (len(kept), kept.num_bad) == (1, 1)


def test_what_is_too_long_is_refused_left_out_or_cut(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "word " * 50, "response": "short"}, {"prompt": "a", "response": "b"}]
    length = len(opened(rows)[0][0].ids)
    with pytest.raises(DataError, match=rf"row 0: it has {length} tokens, more than data.max_length=40"):
        opened(rows, max_length=40)
    with caplog.at_level(logging.WARNING):
        left_out = opened(rows, max_length=40, filter_overlong_prompts=True)
    assert (len(left_out), left_out.num_too_long) == (1, 1)
    assert "1 rows do not fit" in caplog.text
    (kept,) = opened(rows, max_length=40, truncation="left")[0]
    assert len(kept.ids) == 40
    assert trained_text("qwen2.5", kept) == "short<|im_end|>"
    (both_ends,) = opened(rows, max_length=40, truncation="middle")[0]
    whole = opened(rows)[0][0]
    assert (both_ends.ids, both_ends.mask) == (whole.ids[:20] + whole.ids[-20:], whole.mask[:20] + whole.mask[-20:])
    # Cut at the right, nothing of the answer is left: such a row would train nothing.
    with pytest.raises(DataError, match="no token of the assistant is left"):
        opened(rows, max_length=40, truncation="right")


def test_a_batch_is_padded_on_the_right_and_masks_fit_the_ids(tmp_path: Path) -> None:
    file = write_rows([{"messages": TALK}, {"messages": TALK[1:3]}], tmp_path / "talks.jsonl")
    tokenizer = family_tokenizer("qwen3")
    data = ConversationDataset([str(file)], tokenizer, ChatRenderer(tokenizer), DataConfig(), sft=SFTConfig())
    batch = data.batch([0, 1]).tensors
    rows = [*data[0], *data[1]]
    assert len(rows) == 3, "the first conversation is two rows with this template"
    for number, row in enumerate(rows):
        length = len(row.ids)
        assert batch["input_ids"][number, :length].tolist() == row.ids
        assert batch["attention_mask"][number].tolist() == [1] * length + [0] * (batch["input_ids"].shape[1] - length)
        assert batch["loss_mask"][number, :length].tolist() == row.mask
        assert batch["loss_mask"][number, length:].sum() == 0
        assert batch["position_ids"][number, :length].tolist() == list(range(length))


def test_plain_text_needs_an_end_of_text() -> None:
    tokenizer = copy.deepcopy(family_tokenizer("qwen2.5"))
    tokenizer.pad_token, tokenizer.eos_token = tokenizer.eos_token, None
    rows = [ListRows("rows", "0", [{"prompt": "Two?", "response": "2"}])]
    with pytest.raises(DataError, match="names no end of text"):
        ConversationDataset(rows, tokenizer, None, DataConfig(max_length=64), sft=SFTConfig())
