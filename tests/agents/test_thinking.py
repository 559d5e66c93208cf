"""Rows that are trained begin where a model is asked: thinking that the prompt opens, closes or leaves to the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dovetail.agents.chat import ChatRenderer, ChatTemplateError
from dovetail.config.data import DataConfig
from dovetail.config.methods import SFTConfig
from dovetail.data.conversations import ConversationDataset, conversation_rows
from dovetail.data.errors import DataError
from dovetail.data.files import ListRows
from dovetail.data.preferences import PreferenceDataset
from tests.agents.tokenizers import family_tokenizer

pytestmark = pytest.mark.unit

ASKED = {"role": "user", "content": "2+2?"}
SAID = {"role": "assistant", "content": "4"}
INLINE = {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4"}
REASONED = {**SAID, "reasoning_content": "add"}
_DROPS = "m.content.split('</think>')[-1].strip()"
_INLINE = "m.content.split('</think>')[0].removeprefix('<think>').strip()"
_READS = f"(m.reasoning_content or {_INLINE} * ('</think>' in m.content))"
_EMPTY, _THOUGHT = "<think>\n\n</think>\n\n4", "<think>\nadd\n</think>\n\n4"
CLOSES, LOSES = "leaves none to write", "drops the thinking of an answer"
# What the prompt ends with, how the history shows an answer, and what is trained without thinking, with it in the
# content, and with it in a key of its own; or why that is refused.
TEMPLATES = {
    "deepseek-r1, qwq": (r"<think>\n", _DROPS, "\n</think>\n\n4", "add\n</think>\n\n4", "add\n</think>\n\n4"),
    "r1 of january 2025": ("", _DROPS, "4", _THOUGHT, LOSES),
    "deepseek-v3.1": ("<think>", f"'</think>' + {_DROPS}", "</think>4", "\nadd\n</think>\n\n4", "add</think>4"),
    "deepseek-v3.1, not thinking": ("</think>", f"'</think>' + {_DROPS}", "4", CLOSES, CLOSES),
    "qwen3-thinking": (
        r"<think>\n",
        rf"'<think>\n' + {_READS} + '\n</think>\n\n' + {_DROPS}",
        "\n</think>\n\n4",
        "add\n</think>\n\n4",
        "add\n</think>\n\n4",
    ),
    "qwen3": ("", rf"'<think>\n' + {_READS} + '\n</think>\n\n' + {_DROPS}", _EMPTY, _THOUGHT, _THOUGHT),
    "qwen3, not thinking": (r"<think>\n\n</think>\n\n", _DROPS, "4", CLOSES, CLOSES),
    "smollm3, not thinking": (r"<think>\n\n</think>\n", r"'<think>\n\n</think>\n' + m.content", "4", CLOSES, CLOSES),
    "glm-4.5": (
        "",
        rf"'\n<think>' + {_READS} + '</think>\n' + {_DROPS}",
        "\n<think></think>\n4",
        "\n<think>add</think>\n4",
        "\n<think>add</think>\n4",
    ),
    "kimi-k2-thinking": (
        "",
        "'<think></think>' + m.content",
        "<think></think>4",
        "<think>\nadd\n</think>4",
        "<think>add</think>4",
    ),
    "nemotron": (
        r"<think>\n",
        r"'<think>\n' + m.content",
        "\n</think>\n\n4",
        "add\n</think>\n\n4",
        "add\n</think>\n\n4",
    ),
    "qwen2.5": ("", "m.content", "4", _THOUGHT, LOSES),
}


def _renderer(name: str) -> ChatRenderer:
    prompt, history, *_ = TEMPLATES[name]
    tokenizer = copy.deepcopy(family_tokenizer("qwen3"))
    tokenizer.chat_template = (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        f"{{%- if m.role == 'assistant' %}}{{{{ {history} }}}}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
        "{{ '<|im_end|>\\n' }}{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n{prompt}' }}}}{{% endif %}}"
    )
    return ChatRenderer(tokenizer)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(("at", "answer"), [(2, SAID), (3, INLINE), (4, REASONED)], ids=["plain", "inline", "reasoned"])
def test_what_is_trained_is_what_a_model_would_write_after_the_prompt(
    name: str, at: int, answer: dict[str, Any]
) -> None:
    chat, wanted = _renderer(name), TEMPLATES[name][at]
    if wanted in (CLOSES, LOSES):
        with pytest.raises(ChatTemplateError, match=wanted):
            chat.answer([ASKED, answer])
        return
    decode = chat.tokenizer.decode
    prompt = decode(chat.start([ASKED]))
    assert prompt.endswith(TEMPLATES[name][0].replace("\\n", "\n"))
    assert decode(chat.answer([ASKED, answer])) == wanted + "<|im_end|>"
    # Thinking begins once and ends once, wherever the prompt ends.
    thought = (prompt + wanted).partition("assistant")[2]
    assert (thought.count("<think>") <= 1, thought.count("</think>") <= 1) == (True, True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_an_earlier_turn_looks_like_is_what_the_template_shows_then(name: str) -> None:
    """In one row or in two: every prompt is the one an engine is given."""
    chat, more = _renderer(name), {"role": "user", "content": "3+3?"}
    talk = [ASKED, SAID, more, {"role": "assistant", "content": "6"}]
    decode, rows = chat.tokenizer.decode, list(conversation_rows(chat, talk))
    assert decode(rows[-1].ids) == decode(chat.start(talk[:3])) + decode(chat.answer(talk))
    assert sum(sum(row.mask) for row in rows) == len(chat.answer(talk[:2])) + len(chat.answer(talk))


def test_an_empty_block_of_thinking_is_not_kept_where_the_history_has_none() -> None:
    """Qwen3 writes it before the last answer alone."""
    chat, more = ChatRenderer(family_tokenizer("qwen3")), {"role": "user", "content": "3+3?"}
    first, second = conversation_rows(chat, [ASKED, SAID, more, {"role": "assistant", "content": "6"}])
    assert chat.tokenizer.decode(first.ids).endswith("<think>\n\n</think>\n\n4<|im_end|>")
    assert "<|im_start|>assistant\n4<|im_end|>" in chat.tokenizer.decode(second.ids)


def test_an_empty_block_beside_a_prompt_that_closes_the_thinking_is_in_the_prompt_already() -> None:
    chat = ChatRenderer(family_tokenizer("qwen3"), enable_thinking=False)
    empty = {"role": "assistant", "content": "<think>\n\n</think>\n\n4"}
    assert chat.answer([ASKED, empty]) == chat.answer([ASKED, SAID])
    assert chat.tokenizer.decode(chat.answer([ASKED, empty])) == "4<|im_end|>"


def test_calls_follow_the_thinking_that_the_prompt_opened() -> None:
    chat = ChatRenderer(family_tokenizer("deepseek-r1"))
    call = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": {"word": "z"}}}
    asked = [ASKED, {"role": "assistant", "content": "", "reasoning_content": "see", "tool_calls": [call]}]
    text = chat.tokenizer.decode(chat.answer(asked))
    assert text.startswith("see\n</think>\n\n<\uff5ctool▁calls▁begin\uff5c>")
    assert text.endswith("<\uff5ctool▁calls▁end\uff5c><\uff5cend▁of▁sentence\uff5c>")


def test_a_template_that_rewrites_what_came_before_still_writes_the_answer() -> None:
    """gpt-oss drops the thinking before a call once an answer follows it."""
    chat = ChatRenderer(family_tokenizer("gpt-oss"))
    call = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": {"word": "z"}}}
    talk = [ASKED, {"role": "assistant", "content": "", "thinking": "see", "tool_calls": [call]}]
    talk += [{"role": "tool", "tool_call_id": "call00000", "content": "found"}, {**SAID, "thinking": "add"}]
    text = chat.tokenizer.decode(chat.answer(talk))
    assert text == ("<|channel|>analysis<|message|>add<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>")


def test_thinking_that_is_not_closed_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match=r"not closed: '<think>\\nadd' has no </think>; add it"):
        _renderer("qwen3").answer([ASKED, {"role": "assistant", "content": "<think>\nadd"}])


def test_rows_name_what_would_be_lost_before_a_run() -> None:
    chat, config = _renderer("qwen2.5"), DataConfig(max_length=512, max_prompt_length=256, max_response_length=256)
    rows = [{"messages": [ASKED, SAID]}, {"messages": [ASKED, REASONED]}]
    with pytest.raises(DataError, match=f"row 1: .*{LOSES} ..add.."):
        ConversationDataset([ListRows("rows", "0", rows)], chat.tokenizer, chat, config, sft=SFTConfig())
    pair = {"prompt": [ASKED], "chosen": [REASONED], "rejected": [SAID]}
    with pytest.raises(DataError, match=f"row 0: .*{LOSES} ..add.."):
        PreferenceDataset([ListRows("rows", "0", [pair])], chat.tokenizer, chat, config)


def test_both_responses_of_a_pair_close_the_thinking_that_the_prompt_opened() -> None:
    chat, config = (
        ChatRenderer(family_tokenizer("deepseek-r1")),
        DataConfig(max_prompt_length=256, max_response_length=256),
    )
    pair = {"prompt": [ASKED], "chosen": [INLINE], "rejected": [{"role": "assistant", "content": "5"}]}
    (made,) = PreferenceDataset([ListRows("rows", "0", [pair])], chat.tokenizer, chat, config)
    texts = [chat.tokenizer.decode(row.ids) for row in (made.chosen, made.rejected)]
    assert texts == [f"{text}<\uff5cend▁of▁sentence\uff5c>" for text in ("add\n</think>\n\n4", "\n</think>\n\n5")]
