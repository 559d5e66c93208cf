"""Images and videos of a prompt: find their places in the messages, load them, run the processor."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.data.encode import Messages
from dovetail.data.errors import DataError

Loader = Callable[[Any], Any]
_PLACE = re.compile(r"(<image>|<video>)")
# What a processor returns beside these belongs to the images. Types of tokens are those of the prompt alone: the model
# side makes them anew for prompt and answer.
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def load_image(source: Any) -> Any:
    """A PIL image from a path, from bytes, or from the `{"bytes", "path"}` of `datasets`; anything else as it is."""
    if isinstance(source, Mapping):
        content, path = source.get("bytes"), source.get("path")
        if content is None and path is None:
            raise DataError(f"an image has neither bytes nor path, only {', '.join(map(str, source))}.")
        return load_image(content if content is not None else path)
    if not isinstance(source, (str, bytes)):
        return source
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ImportError("prompts with images need the package pillow; pip install pillow.") from error
    return image.open(io.BytesIO(source) if isinstance(source, bytes) else source).convert("RGB")


def place_media(messages: Messages, num_images: int, num_videos: int, where: str) -> Messages:
    """Replace `<image>` and `<video>` in the texts by the parts that chat templates understand, and count them."""
    placed, counts = [], {"image": 0, "video": 0}
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            parts = [_part(piece) for piece in _PLACE.split(content) if piece]
        else:
            parts = [{key: value for key, value in part.items() if value is not None} for part in content or []]
        for part in parts:
            if part.get("type") in counts:
                counts[part["type"]] += 1
        placed.append({**message, "content": parts})
    for kind, wanted in (("image", num_images), ("video", num_videos)):
        if counts[kind] != wanted:
            raise DataError(
                f"{where}: the prompt names <{kind}> {counts[kind]} times and the row has {wanted} {kind}s; "
                "they must be as many."
            )
    return placed


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt with images or videos. `ids` has the placeholders widened; `inputs` are the tensors for the model."""

    text: str
    ids: list[int]
    inputs: dict[str, Any]
    media: dict[str, list[Any]]


def process_media(
    processor: Any, messages: Messages, images: list[Any], videos: list[Any], where: str, **template_kwargs: Any
) -> MediaPrompt:
    """Fill in the chat template and run the processor."""
    parts = place_media(messages, len(images), len(videos), where)
    text = processor.apply_chat_template(parts, add_generation_prompt=True, tokenize=False, **template_kwargs)
    given = {name: values for name, values in (("images", images), ("videos", videos)) if values}
    inputs = dict(processor(text=[text], **given, return_tensors="pt", add_special_tokens=False))
    return MediaPrompt(
        text=text,
        ids=inputs["input_ids"][0].tolist(),
        inputs={name: value for name, value in inputs.items() if name not in _TEXT_INPUTS},
        media={name: values for name, values in (("image", images), ("video", videos)) if values},
    )


def _part(piece: str) -> dict[str, str]:
    return {"type": piece[1:-1]} if _PLACE.fullmatch(piece) else {"type": "text", "text": piece}
