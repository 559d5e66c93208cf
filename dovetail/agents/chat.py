"""Messages to token ids, append-only. Samples nothing; what the model wrote is never decoded and encoded again.

A chat template is code, so what it does is found out by rendering. `extend` gives the ids that follow the model's own
tokens only if the template, asked for the whole conversation, writes the same text before and after them. `audit` asks
the same for the usual kinds of conversation once, for people to read.
"""

from __future__ import annotations

import contextlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from dovetail.agents.template_audit import (
    PROBES,
    TOOL,
    AuditCase,
    Property,
    Rewrite,
    TemplateAudit,
    audited_conversations,
    model_calls,
    model_says,
    tool_says,
    user_says,
)
from dovetail.agents.thinking import (
    THINKING_TAG,
    LostThinkingError,
    Prompt,
    lost_part,
    split_answer,
    text_of,
    written_after,
)
from dovetail.agents.types import Message, Schemas
from dovetail.data.encode import reads_parts_alone, with_parts

# A noncharacter, which no text should hold: stands in rendered text where an encoding has to be cut.
CUT = "\ufdd0"


class ChatTemplateError(ValueError):
    """The tokenizer's chat template refuses a conversation."""


class Tail(NamedTuple):
    """What follows an answer: its stop token, the new messages and the next generation prompt; `body` comes before."""

    body: str
    text: str
    ids: list[int]


@dataclass(slots=True)
class Rendered:
    """The last prompt of a conversation, kept by its owner from one turn to the next: it need not be rendered again."""

    messages: list[Message] | None = None
    """As they were given; whoever has them must not change them."""
    tools: Schemas | None = None
    prepared: list[Message] = field(default_factory=list)
    text: str = ""


class ChatRenderer:
    """The conversations of one tokenizer. Text of users and tools is data: special tokens in it are plain text.

    Such a text is encoded in two pieces, cut after the first character of the special token; tokenizers that put a
    space before every text (Llama 2's) put one there, too.
    """

    def __init__(self, tokenizer: Any, tools: Schemas | None = None, **template_kwargs: Any):
        if not tokenizer.chat_template:
            raise ChatTemplateError(
                "the tokenizer has no chat template; set actor_rollout_ref.model.custom_chat_template."
            )
        self.tokenizer = tokenizer
        self.tools = list(tools) if tools else None
        self._kwargs = template_kwargs
        source = str(tokenizer.chat_template)
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values() if len(str(token)) > 1}
        special = [text for text, is_special in added.items() if is_special]
        self._special = _any_of(special)
        self._markup = _any_of(list(added))
        self._cut_special = _starts_of(special)
        # Markup of templates is often not special to the tokenizer: <think>, <tool_response>.
        self._cut_markup = _starts_of([text for text, is_special in added.items() if is_special or text in source])
        self._splits_thinking = "thinking" in source and "</think>" not in source
        self._writes_calls = True
        self._reads_parts = reads_parts_alone(tokenizer, template_kwargs)
        try:
            text = self._render([user_says("hi"), model_calls("hi", PROBES[0])], None, generation=False)
            self._writes_calls = PROBES[0] in text
        except ChatTemplateError:
            self._writes_calls = False
        self._stops = self._find_stops()

    def with_kwargs(self, **template_kwargs: Any) -> ChatRenderer:
        """Another renderer of this tokenizer, with these arguments of the template beside its own."""
        return ChatRenderer(self.tokenizer, self.tools, **(self._kwargs | template_kwargs))

    def with_media(self, images: Sequence[Any], videos: Sequence[Any]) -> ChatRenderer:
        """A renderer of one conversation, whose placeholders stand for these (`MediaRenderer`)."""
        raise ChatTemplateError("it has images or videos, and the model has no processor for them.")

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the tokenizer's end of sequence and what the template writes there."""
        ids = {self.tokenizer.convert_tokens_to_ids(stop) for stop in self._stops}
        return tuple(sorted(ids | {self.tokenizer.eos_token_id} - {None}))

    def start(
        self, messages: Sequence[Message], tools: Schemas | None = None, *, rendered: Rendered | None = None
    ) -> list[int]:
        """Ids of the conversation and of the generation prompt, exactly as the template writes them."""
        prepared = [self._prepared(message) for message in messages]
        text = self._render_prepared(prepared, tools, generation=True)
        if rendered is not None:
            rendered.messages, rendered.tools, rendered.prepared, rendered.text = list(messages), tools, prepared, text
        return self._encode(text)

    def extend(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        *,
        closed: bool,
        tools: Schemas | None = None,
        stop_id: int | None = None,
        written: Sequence[int] | None = None,
        rendered: Rendered | None = None,
    ) -> list[int] | None:
        """The ids between the model's last token and its next turn; None where the template rewrites history.

        `messages` ends with the model's answer, `new` follows it. `closed`: the model wrote its stop token (`stop_id`,
        where it has several); an answer that was cut is closed here. `written`: the answer as it came from `answer`;
        None, too, where the history shows it otherwise (without Qwen3's empty thinking). Ids that were sampled are not
        needed.
        With `rendered`, the prompt of that answer is not rendered a second time. It changes no id.
        """
        tail = self._tail(messages, new, tools, rendered or Rendered())
        if isinstance(tail, Rewrite):
            return None
        if not closed:
            return tail.ids
        if written is not None:
            stop_id = written[-1]
            if self._encode_text(tail.body) != list(written[:-1]):
                return None
        return tail.ids[1:] if stop_id is None or stop_id == tail.ids[0] else None

    def answer(self, messages: Sequence[Message], tools: Schemas | None = None) -> list[int]:
        """Ids that a model should write for the last message after `start` of the others, its stop token included.

        As the template writes them, with what it leaves out of the history: the thinking that the prompt has opened.
        Where the template writes something else before the answer than in the prompt, the answer's own text.
        """
        assert messages[-1]["role"] == "assistant", "the last message is the model's answer"
        *asked, answer = (self._prepared(message) for message in messages)
        try:
            prompt = self._prompt(asked, tools)
            parts = split_answer(answer, prompt.generation)
            full = self._render_prepared([*asked, answer], tools, generation=False)
            rest = written_after(prompt, full, answer)
            if rest is None:
                # A template that rewrites earlier messages still writes this one as it would after any question.
                question = self._prompt([user_says("hi")], tools)
                if question.generation == prompt.generation:
                    again = self._render_prepared([user_says("hi"), answer], tools, generation=False)
                    rest = written_after(question, again, answer)
        except LostThinkingError as error:
            raise ChatTemplateError(str(error)) from error
        said = parts.said.strip()
        stop = self._stops[-1 if "tool_calls" in answer else 0] if self._stops else ""
        if rest is None:
            if "tool_calls" in answer or parts.has_thinking or not said:
                raise ChatTemplateError(
                    f"the template rewrites the prompt of an answer: {_difference(prompt.text, full)}"
                )
            return self._encode_text(text_of(answer) + stop)
        if said and "tool_calls" not in answer and lost_part({"content": said}, rest) is not None:
            raise ChatTemplateError(
                f"the chat template leaves out the text of an answer ({said[:60]!r}), or a part of it: it writes "
                f"{rest[:90]!r}. Take it out of the row, or set actor_rollout_ref.model.custom_chat_template."
            )
        # Up to the last stop token: the text may be a part of one, as "end" is.
        last = max((rest.rfind(token) for token in self._stops), default=-1)
        end = rest if last < 0 or said not in rest[:last] else rest[:last]
        after = end.rfind(said) + len(said) if said in end and said else 0
        ends = [end + len(token) for token in self._stops if (end := rest.find(token, after)) >= 0]
        # Some families end an answer with what begins the next message, which is not there yet.
        return self._encode_text(rest[: min(ends)] if ends else rest + stop)

    def _prompt(self, messages: list[Message], tools: Schemas | None) -> Prompt:
        text = self._render_prepared(messages, tools, generation=True)
        if THINKING_TAG.search(text) is None:
            return Prompt(text, "")
        bare = self._render_prepared(messages, tools, generation=False)
        return Prompt(text, text[len(bare) :] if text.startswith(bare) else "")

    def tokens_before(self, ids: Sequence[int], texts: Sequence[str], *, inclusive: bool = False) -> int:
        """How many ids can be kept so that none of the texts begins in them; `inclusive`: until the first has ended."""
        decode = self.tokenizer.decode
        whole = decode(list(ids))
        found = [at + inclusive * len(text) for text in texts if (at := whole.find(text)) >= 0]
        if not found:
            return len(ids)
        bisect = bisect_left if inclusive else bisect_right
        return bisect(range(len(ids)), min(found), key=lambda count: len(decode(list(ids[:count])))) - (not inclusive)

    @cached_property
    def audit(self) -> TemplateAudit:
        """What the template does with the usual conversations."""
        try:
            shows_tools = TOOL["function"]["name"] in self._render([user_says("hi")], [TOOL], generation=True)
        except ChatTemplateError:
            shows_tools = False
        cases = tuple(
            AuditCase(name, self._audited(conversations)) for name, conversations in audited_conversations().items()
        )
        return TemplateAudit(cases, self._stops, shows_tools, self._writes_calls)

    def _audited(self, conversations: Sequence[tuple[list[Message], list[Message]]]) -> Rewrite | None:
        """What goes wrong with conversations that differ in the answer alone."""
        tails = []
        for messages, new in conversations:
            has_calls = any("tool_calls" in message for message in messages)
            tools = self.tools or ([TOOL] if has_calls else None)
            try:
                tail = self._tail(messages, new, tools, Rendered())
                before = self._render(messages, tools, generation=False)
            except ChatTemplateError as error:
                return Rewrite("accepted", str(error))
            if isinstance(tail, Rewrite):
                return tail
            if any(message["content"] not in tail.text for message in new):
                return Rewrite("accepted", f"the template leaves out a message of role {new[0]['role']}")
            if self._encode(before + tail.text) != self._encode(before) + tail.ids:
                return Rewrite("boundary", f"{before!r} and {tail.text!r} are not encoded apart")
            tails.append(tail.text)
        if len(set(tails)) > 1:
            return Rewrite("closing", f"other text follows another answer: {tails[0]!r}, {tails[1]!r}")
        return None

    def _tail(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Schemas | None, rendered: Rendered
    ) -> Tail | Rewrite:
        """What comes from the answer's stop token to the next generation prompt, or why it does not simply follow."""
        assert messages[-1]["role"] == "assistant", "the last message is the model's answer"
        known = (rendered.messages, rendered.tools) == (messages[:-1], tools)
        asked = rendered.prepared if known else [self._prepared(message) for message in messages[:-1]]
        answer, prompt = self._prepared(messages[-1]), rendered.text
        prepared = [*asked, answer, *(self._prepared(message) for message in new)]
        full = self._render_prepared(prepared, tools, generation=True)
        # Templates may write the time of day: only a prompt that is rendered now tells a rewrite.
        if not known or not full.startswith(prompt):
            prompt = self._render_prepared(asked, tools, generation=True)
        rendered.messages, rendered.tools, rendered.prepared, rendered.text = [*messages, *new], tools, prepared, full
        if not full.startswith(prompt):
            bare = self._render_prepared(asked, tools, generation=False)
            broken: Property = "generation_prompt" if full.startswith(bare) else "prefix"
            return Rewrite(broken, _difference(prompt, full))
        rest = full[len(prompt) :]
        content = text_of(answer).strip()
        after = max(0, rest.find(content)) + len(content) if content in rest else 0
        ends = [(end, stop) for stop in self._stops if (end := rest.find(stop, after)) >= 0]
        if not ends:
            return Rewrite("closing", f"{rest[after:][:120]!r} follows the answer, and no {' or '.join(self._stops)}")
        end, stop = min(ends)
        body, tail = rest[:end], rest[end:]
        lead = body.partition(content)[0] if content and content in body else ""
        if lead.strip() and self._markup.search(lead) is None:
            return Rewrite("generation_prompt", f"{lead!r} stands before the answer, but not in the prompt for it")
        if (lost := lost_part(answer, body)) is not None:
            return Rewrite("independence", f"{lost!r} was sampled; the history has {body!r}")
        ids = self._encode(tail)
        if ids[0] != self.tokenizer.convert_tokens_to_ids(stop):
            return Rewrite("boundary", f"{tail!r} does not begin with the id of one special token")
        return Tail(body, tail, ids)

    def _find_stops(self) -> tuple[str, ...]:
        """The special tokens that end an answer: with text, and with calls."""
        between = self._between_calls()
        stops: list[str] = []
        for answer, reply in ((model_says(PROBES[0]), user_says("hi")), (model_calls("", PROBES[0]), tool_says("hi"))):
            try:
                last = self._render([user_says("hi"), answer], None, generation=False)
                followed = self._render([user_says("hi"), answer, reply], None, generation=True)
            except ChatTemplateError:
                continue
            if PROBES[0] not in last or PROBES[0] not in followed:
                continue
            tails = [text.rpartition(PROBES[0])[2] for text in (last, followed)]
            shared, in_last, in_followed = (
                [token for token in self._special.findall(text) if token not in between]
                for text in (_common_prefix(*tails), *tails)
            )
            # All calls together may be closed by a special token, so the last one counts. Where an answer ends in
            # another token once it is history, the model was taught the one that ends the last message.
            stops += shared[-1:] or in_last[:1] or in_followed[:1]
        return tuple(dict.fromkeys(stops))

    def _between_calls(self) -> set[str]:
        """Special tokens that end or begin one call of several: they do not end an answer."""
        try:
            text = self._render([user_says("hi"), model_calls("", *PROBES)], None, generation=False)
        except ChatTemplateError:
            return set()
        between, second, _ = text.partition(PROBES[0])[2].partition(PROBES[1])
        return set(self._special.findall(between)) if second else set()  # gpt-oss writes one call only

    def _render(self, messages: Sequence[Message], tools: Schemas | None, *, generation: bool) -> str:
        return self._render_prepared([self._prepared(message) for message in messages], tools, generation=generation)

    def _render_prepared(self, messages: list[Message], tools: Schemas | None, *, generation: bool) -> str:
        from jinja2 import TemplateError

        tools = tools if tools is not None else self.tools
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                add_generation_prompt=generation,
                tokenize=False,
                **self._kwargs,
            )
        # A template that meets a value of another type than it was written for fails like any Python code.
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ChatTemplateError(f"the chat template refuses a conversation of {roles}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        """What stands before an answer, where a subclass may have more than text."""
        return self._encode_text(text)

    def _encode_text(self, text: str) -> list[int]:
        pieces, fast = text.split(CUT), getattr(self.tokenizer, "backend_tokenizer", None)
        # The library's wrapper takes as long as the tokenizer itself. It is needed where a call of somebody else has
        # left the tokenizer in a state that changes ids.
        if fast is not None and not (fast.truncation or fast.padding or fast.encode_special_tokens):
            return [id for piece in pieces for id in fast.encode(piece, add_special_tokens=False).ids]
        return [id for piece in pieces for id in self.tokenizer.encode(piece, add_special_tokens=False)]

    def _prepared(self, message: Message) -> Message:
        """The message as templates want it: no None, arguments as a mapping, special tokens in its text cut."""
        message = {key: value for key, value in message.items() if value is not None}
        content = message.setdefault("content", "")
        is_answer = message["role"] == "assistant"
        if is_answer and self._splits_thinking and isinstance(content, str) and "</think>" in content:
            thinking, _, said = content.partition("</think>")
            message["content"] = said.lstrip("\n")
            message["thinking"] = thinking.removeprefix("<think>").strip()
        if calls := message.pop("tool_calls", None):
            calls = [_with_arguments(call) for call in calls]
            if self._writes_calls:
                message["tool_calls"] = calls
            else:
                written = "\n".join(_hermes(call["function"]) for call in calls)
                message["content"] = f"{text_of(message)}\n{written}".lstrip("\n")
        if self._reads_parts:
            message = with_parts(message)
        pattern = self._cut_special if is_answer else self._cut_markup
        return {key: _cut(value, pattern) if key != "role" else value for key, value in message.items()}


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI has arguments as JSON, templates want what it says."""
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def _hermes(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function.get("arguments")}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _common_prefix(first: str, second: str) -> str:
    length = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first[:length]


def _difference(prompt: str, full: str) -> str:
    at = len(_common_prefix(prompt, full))
    since = max(0, at - 20)
    return f"was {prompt[since : at + 60]!r}, becomes {full[since : at + 60]!r}"


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)")


def _starts_of(texts: Sequence[str]) -> re.Pattern[str]:
    """The first character of every occurrence, overlapping ones included."""
    return re.compile(f"(?=(?:{_any_of(texts).pattern}))(.)", re.DOTALL)


def _cut(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        value = value.encode(errors="replace").decode()  # no half characters, which a tokenizer refuses
        return pattern.sub(rf"\g<1>{CUT}", value.replace(CUT, "\ufffd"))
    if isinstance(value, Mapping):
        return {_cut(key, pattern): _cut(entry, pattern) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cut(entry, pattern) for entry in value]
    return value
