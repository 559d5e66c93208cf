"""A stand-in for a tokenizer that cannot be read, so that what needs none is checked all the same: columns, messages,
rewards. Imports no torch: scoring processes are sent it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any


class UnreadTokenizer:
    """Every text is one token. Takes all messages, as tokenizer and as `dovetail.data.examples.Renderer`."""

    chat_template = "not read"
    pad_token_id = eos_token_id = 0

    def __call__(self, texts: str | list[str], **_: Any) -> dict[str, list[Any]]:
        return {"input_ids": self.encode(texts) if isinstance(texts, str) else [self.encode(text) for text in texts]}

    def encode(self, text: str, **_: Any) -> list[int]:
        return [zlib.crc32(text.encode(errors="replace")) >> 1]  # fits int32

    def apply_chat_template(self, messages: Sequence[Any], **_: Any) -> str:
        return repr(messages[-1])

    def with_kwargs(self, **_: Any) -> UnreadTokenizer:
        return self

    def with_media(self, images: Sequence[Any], videos: Sequence[Any]) -> UnreadTokenizer:
        return self

    def start(self, messages: Sequence[Any], tools: Any = None) -> list[int]:
        return [1]

    def answer(self, messages: Sequence[Any], tools: Any = None) -> list[int]:
        return self.encode(repr(messages[-1]))

    def extend(self, messages: Sequence[Any], new: Sequence[Any], **_: Any) -> list[int]:
        return [1]

    def batch_decode(self, rows: Sequence[Any], **_: Any) -> list[str]:
        return ["" for _ in rows]
