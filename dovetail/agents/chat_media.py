"""`MediaRenderer`: conversations with images and videos as ids, placeholders widened by the model's processor.

It is given the images of one conversation, as the file has them, and opens them; makes no tensors for the model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.agents.chat import CUT, ChatRenderer, ChatTemplateError
from dovetail.agents.types import Message, Schemas
from dovetail.data.encode import count_media, open_image, run_processor


class MediaRenderer(ChatRenderer):
    """A `ChatRenderer` that can be given images. Without any, it is one."""

    _media: tuple[Sequence[Any], Sequence[Any]] = ((), ())
    """Images and videos, in the order of their placeholders."""
    _encoded: tuple[int, int] = (0, 0)
    """How many of each kind are in the text so far."""
    _present: tuple[int, int] = (0, 0)
    """How many are in the text that is encoded next."""

    def __init__(
        self,
        tokenizer: Any,
        processor: Any,
        tools: Schemas | None = None,
        *,
        processor_kwargs: Mapping[str, Any] | None = None,
        **template_kwargs: Any,
    ) -> None:
        self._processor, self._processor_kwargs = processor, processor_kwargs or {}
        super().__init__(tokenizer, tools, **template_kwargs)

    def with_kwargs(self, **template_kwargs: Any) -> MediaRenderer:
        own = {"processor_kwargs": self._processor_kwargs, **self._kwargs}
        return MediaRenderer(self.tokenizer, self._processor, self.tools, **(own | template_kwargs))

    def with_media(self, images: Sequence[Any], videos: Sequence[Any]) -> MediaRenderer:
        if not self._stops:
            raise ChatTemplateError(
                "no special token ends an answer in the chat template of this model; set "
                "actor_rollout_ref.model.custom_chat_template to a template that writes one."
            )
        renderer = copy.copy(self)
        renderer._media = [open_image(source) for source in images], videos
        return renderer

    def start(self, messages: Sequence[Message], tools: Any = None, **more: Any) -> list[int]:
        self._encoded, self._present = (0, 0), count_media(messages)
        return super().start(messages, tools, **more)

    def extend(self, messages: Sequence[Message], new: Sequence[Message], **more: Any) -> list[int] | None:
        self._encoded, self._present = count_media(messages), count_media(new)
        return super().extend(messages, new, **more)

    def answer(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        if any(count_media(messages[-1:])):
            raise ChatTemplateError("the assistant's message holds an image or a video; models here write text alone.")
        return super().answer(messages, tools)

    def _encode(self, text: str) -> list[int]:
        if not any(self._present):
            return super()._encode(text)
        if CUT in text:
            raise ChatTemplateError(
                "a message beside an image holds markup of the chat template as text; take it out of the message."
            )
        images, videos = (
            media[first : first + count]
            for media, first, count in zip(self._media, self._encoded, self._present, strict=True)
        )
        media = list(images), list(videos)
        return run_processor(self._processor, text, *media, "it", self._processor_kwargs)["input_ids"][0].tolist()
