"""`ConversationDataset`: conversations as token ids, with a mask of what the assistant wrote.

A row has a list of messages (`sft.messages_key`, with `sft.tools_key` beside it), or a prompt and a response. Ids stand
as they do when the model is asked: the prompt is what an engine is given, an answer is encoded apart from it, and later
messages are appended. Where the chat template rewrites what came before (it drops thinking from the history, say), the
conversation goes on in a row of its own. Every answer is trained once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from dovetail.config.methods import SFTConfig
from dovetail.data.encode import (
    Messages,
    count_media,
    is_message,
    media_kinds,
    media_tensors,
    open_image,
    place_media,
    short,
    truncate,
    with_text,
)
from dovetail.data.errors import DataError
from dovetail.data.examples import TEXT_ALONE, ExampleDataset, Renderer, TooLong, pad_rows
from dovetail.protocol import DataProto

_PROBE = [{"role": "user", "content": "hi"}]
COMPLETION = "completion"
"""What TRL calls the response; read where there is no column of `sft.response_key`."""


class TokenRow(NamedTuple):
    """Token ids; the mask is 1 on those that are trained."""

    ids: list[int]
    mask: list[int]
    media: tuple[int, int] = (0, 0)
    """How many of the conversation's images, and of its videos, are in the row: the first ones."""
    media_digest: str = ""
    """Changes when one of the conversation's images does."""

    def first_answer(self) -> tuple[list[int], list[int]]:
        """What comes before the first trained token, and the answer that it begins."""
        start = self.mask.index(1)
        end = self.mask.index(0, start) if 0 in self.mask[start:] else len(self.mask)
        return self.ids[:start], self.ids[start:end]


Conversation = tuple[TokenRow, ...]


class ConversationDataset(ExampleDataset[Conversation]):
    """The conversations of one or more files. Each is one row, or several where the template rewrites its history.

    Images are opened once when rows are read, for their number of tokens, and again for each batch: only ids are kept.
    """

    reads_media = True

    def __init__(self, *source: Any, sft: SFTConfig, processor: Any = None, **which: int) -> None:
        """`source` and `which` as for `ExampleDataset`; `processor` is that of a model that sees images."""
        self._sft, self._processor = sft, processor
        self.hides_tools: bool | None = None
        """Whether the chat template leaves out tools without a word; None without rows that have some."""
        self.ignores_thinking: bool | None = None
        """Whether `sft.enable_thinking_key` changes no prompt; None without rows that set it."""
        self.drops_text: bool | None = None
        """Whether the chat template leaves out the text beside a call; None without rows that have both."""
        self._thinking: dict[bool, Renderer] = {}
        super().__init__(*source, **which)
        self.has_media = any(any(row.media) for rows in self._examples for row in rows)

    def encode(self, row: Mapping[str, Any]) -> Iterator[Conversation]:
        messages = self._messages(row)
        try:
            rows = self._token_rows(row, messages)
        except DataError:
            raise
        except ValueError as error:  # ChatTemplateError: says what the template refuses
            raise DataError(str(error)) from error
        if not any(any(row.mask) for row in rows):
            raise DataError("every message of the assistant has weight 0; one must be trained.")
        kept = tuple(row for row in (self._fitted(row) for row in rows) if any(row.mask))
        if not kept:
            raise TooLong(
                f"no token of the assistant is left after cutting at data.max_length={self.config.longest}; raise it, "
                "or cut at the other side with data.truncation."
            )
        yield kept

    def batch(self, indices: Sequence[int] | np.ndarray) -> DataProto:
        rows = [(int(index), row) for index in indices for row in self._examples[int(index)]]
        columns = pad_rows([(row.ids, row.mask) for _, row in rows], self._pad_id)
        if not self.has_media:
            return DataProto.from_dict(columns)
        # On every row of every batch: all ranks must call the same networks.
        return DataProto.from_dict(columns, {"multi_modal_inputs": [self._tensors(*row) for row in rows]})

    def _tensors(self, index: int, row: TokenRow) -> dict[str, Any]:
        """What the model reads beside the ids of the row."""
        if not any(row.media):
            return {}
        images, videos = self._media_of(self.row_of(index))
        opened = [open_image(source) for source in images[: row.media[0]]]
        settings = self.config.mm_processor_kwargs
        return media_tensors(self._processor, opened, videos[: row.media[1]], f"row {index}", settings)

    def _token_rows(self, row: Mapping[str, Any], messages: Messages) -> list[TokenRow]:
        renderer = self._renderer_of(row)
        images, videos = self._media_of(row)
        digest = ""
        if images or videos or media_kinds(messages):
            if renderer is None:
                raise DataError("it has images or videos, and the model has no chat template to show them with.")
            renderer = renderer.with_media(images, videos)
            messages = place_media(messages, len(images), len(videos), self._sft.messages_key)
            digest = _digest([images, videos])
        if renderer is None:
            return [self._plain_text(messages)]
        tools = checked_tools(row.get(self._sft.tools_key))
        if tools and self.hides_tools is None:
            self.hides_tools = renderer.start(_PROBE, tools) == renderer.start(_PROBE)
        if self.drops_text is None and (call := next(filter(_has_text_beside_call, messages), None)) is not None:
            self.drops_text = False
            with suppress(ValueError):  # ChatTemplateError: a template that refuses a call without text shows it
                said, unsaid = (renderer.answer([*_PROBE, one], tools) for one in (call, {**call, "content": ""}))
                self.drops_text = said == unsaid
        return [row._replace(media_digest=digest) for row in conversation_rows(renderer, messages, tools)]

    def _renderer_of(self, row: Mapping[str, Any]) -> Renderer | None:
        """The one whose template lets the model think, or not, as the row says."""
        key, thinks = self._sft.enable_thinking_key, row.get(self._sft.enable_thinking_key)
        if thinks is None:
            thinks = self._sft.enable_thinking_default
        if thinks is None:
            return self._renderer
        if not isinstance(thinks, bool | int | np.bool_) or thinks not in (0, 1):
            raise DataError(f"{key} is {short(thinks)}; it must be true, false or null.")
        if self._renderer is None:
            self.ignores_thinking = True
            return None
        if not self._thinking:
            both = {value: self._renderer.with_kwargs(enable_thinking=value) for value in (False, True)}
            self.ignores_thinking = both[False].start(_PROBE) == both[True].start(_PROBE)
            self._thinking = both
        return self._thinking[bool(thinks)]

    def _messages(self, row: Mapping[str, Any]) -> Messages:
        sft = self._sft
        if row.get(sft.messages_key) is not None:
            return checked_messages(row[sft.messages_key], sft.messages_key, media=True)
        prompt = _inside(row, self.config.prompt_key, sft.prompt_dict_keys)
        has_other_name = row.get(sft.response_key) is None and COMPLETION in row
        named = COMPLETION if has_other_name else sft.response_key
        response = _inside(row, named, sft.response_dict_keys)
        if response is None or prompt is None:
            columns = ", ".join(name for name in row if row[name] is not None) or "empty columns"
            raise DataError(
                f"it has neither {sft.messages_key!r} nor both of {self.config.prompt_key!r} and {sft.response_key!r}, "
                f"only {columns}; name its columns with sft.messages_key, or data.prompt_key and sft.response_key."
            )
        return [
            *_as_messages(prompt, "user", self.config.prompt_key),
            *_as_messages(response, "assistant", named),
        ]

    def _plain_text(self, messages: Messages) -> TokenRow:
        """Prompt and response end to end, closed by the tokenizer's end of sequence."""
        if [message["role"] for message in messages] != ["user", "assistant"]:
            raise DataError(
                "it is a conversation, but the tokenizer has no chat template; set "
                "actor_rollout_ref.model.custom_chat_template, or give a prompt and a response."
            )
        prompt_ids, own = self._text_ids(*(message["content"] for message in messages))
        return TokenRow([*prompt_ids, *own], [*([0] * len(prompt_ids)), *([1] * len(own))])

    def _fitted(self, row: TokenRow) -> TokenRow:
        limit, side = self.config.longest, self.config.truncation
        if len(row.ids) <= limit:
            return row
        if side == "error" or self.config.filter_overlong_prompts:
            raise TooLong(
                f"it has {len(row.ids)} tokens, more than data.max_length={limit}; raise it to {len(row.ids)}, set "
                "data.filter_overlong_prompts=True to leave such rows out, or data.truncation=right (or left) to cut."
            )
        if any(row.media):
            raise TooLong(
                f"it has {len(row.ids)} tokens, more than data.max_length={limit}, and a row with images is not cut; "
                "raise the length, or set data.filter_overlong_prompts=True to leave such rows out."
            )
        return TokenRow(truncate(row.ids, limit, side, ""), truncate(row.mask, limit, side, ""))


def conversation_rows(renderer: Renderer, messages: Messages, tools: Any = None) -> Iterator[TokenRow]:
    """The rows of a conversation: one, and another wherever the chat template rewrites what came before.

    An answer with `weight: 0` is context only.
    """
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"its messages have the roles {roles}; one of the assistant is what is trained.")
    if turns[0] == 0:
        raise DataError("it begins with the assistant; put a message of the user or the system before it.")
    ids: list[int] = []
    mask: list[int] = []
    media = (0, 0)
    before: int | None = None
    """The answer before this one."""
    own: list[int] = []
    for turn in turns:
        between = None
        if before is not None:
            # Two answers in a row: what follows the first is not known without a message between them.
            observed = messages[before + 1 : turn]
            if observed:
                between = renderer.extend(messages[: before + 1], observed, closed=True, tools=tools, written=own)
        if between is None:
            if ids:
                yield TokenRow(ids, mask, media)
            ids, mask, between = [], [], renderer.start(messages[:turn], tools)
        own = renderer.answer(messages[: turn + 1], tools)
        trained = int(messages[turn].get("weight") != 0)
        ids, mask = [*ids, *between, *own], [*mask, *([0] * len(between)), *([trained] * len(own))]
        before, media = turn, count_media(messages[:turn])
    yield TokenRow(ids, mask, media)


def checked_messages(value: Any, name: str, *, media: bool = False) -> Messages:
    """A list of messages with role and content, without the Nones that Arrow fills in; with `media`, some may hold
    images."""
    if isinstance(value, (list, tuple, np.ndarray)) and len(value) and all(is_message(entry) for entry in value):
        if not media and (kinds := media_kinds(list(value))):
            raise DataError(f"{name} has a part of the type {kinds[0]!r}; {TEXT_ALONE}")
        return [with_text({key: entry for key, entry in message.items() if entry is not None}) for message in value]
    raise DataError(f"{name} is {short(value)}; it must be a list of messages with role and content.")


def _has_text_beside_call(message: Mapping[str, Any]) -> bool:
    content = message.get("content") if message["role"] == "assistant" and message.get("tool_calls") else ""
    return isinstance(content, str) and bool(content.strip())


def _as_messages(value: Any, role: str, name: str) -> Messages:
    return [{"role": role, "content": value}] if isinstance(value, str) else checked_messages(value, name, media=True)


def _inside(row: Mapping[str, Any], key: str, inner: Iterable[str]) -> Any:
    """The column, or what is found in it by these keys one after the other."""
    value = row.get(key)
    for name in inner:
        if not isinstance(value, Mapping) or name not in value:
            raise DataError(f"{key} has no {name!r} in it; it is {type(value).__name__}.")
        value = value[name]
    return value


def _digest(media: Any) -> str:
    """Of images as files have them: paths and bytes."""
    text = json.dumps(media, sort_keys=True, default=lambda value: value.hex() if isinstance(value, bytes) else "")
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def checked_tools(value: Any) -> Any:
    """Schemas of tools, which files have as a list or as JSON; None without any."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"tools is not JSON: {error}.") from error
    if value is not None and not isinstance(value, (list, tuple)):
        raise DataError(f"tools is a {type(value).__name__}; it must be a list of schemas.")
    return value or None
