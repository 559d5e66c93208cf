"""From chat messages, images and videos to token ids of bounded length and the inputs of a model. Reads no rows."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from dovetail.data.errors import DataError
from dovetail.data.files import without_nulls

Truncation = Literal["error", "left", "right", "middle"]
Messages = list[dict[str, Any]]
Loader = Callable[[Any], Any]
_PROBE = {"role": "user", "content": "zebra"}
_PLACE = re.compile(r"(<image>|<video>)")
# What a processor returns beside these belongs to the images. Types of tokens are those of the prompt alone: the model
# side makes them anew for prompt and answer.
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class PromptEncoder:
    """Fills in the chat template and tokenises. A plain string is one user message, or mere text without a template."""

    tokenizer: Any
    template_kwargs: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]] | None = None

    def messages(self, prompt: Any, where: str) -> Messages | str:
        """The prompt as messages, or as the text it is."""
        if isinstance(prompt, str) and (prompt or self.tokenizer.chat_template):
            return [{"role": "user", "content": prompt}] if self.tokenizer.chat_template else prompt
        if not isinstance(prompt, (list, tuple)) or not prompt or not all(is_message(entry) for entry in prompt):
            raise DataError(
                f"{where}: the prompt is {short(prompt)}; it must be text or a list of messages with role and content."
            )
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{where}: the prompt is a chat, but the tokenizer has no chat template; set "
                "actor_rollout_ref.model.custom_chat_template, or give prompts as plain text."
            )
        # Templates take a None for a value.
        return [with_text(without_nulls(dict(message))) for message in prompt]

    @cached_property
    def _reads_parts(self) -> bool:
        return reads_parts_alone(self.tokenizer, self.template_kwargs)

    def render(self, messages: Messages | str, where: str) -> str:
        """The prompt's text as the model will see it."""
        if isinstance(messages, str):
            return messages
        if self._reads_parts:
            messages = [with_parts(message) for message in messages]
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=list(self.tools) if self.tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **self.template_kwargs,
            )
        # A template that meets a value of another type than it was written for fails like any Python code.
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"{where}: the chat template refuses the prompt: {error}") from error

    def token_ids(self, texts: Sequence[str], *, is_chat: bool) -> list[list[int]]:
        """Ids of rendered texts. A template writes its own special tokens; a plain text gets the tokenizer's."""
        if not texts:
            return []
        return self.tokenizer(list(texts), add_special_tokens=not is_chat)["input_ids"]

    def encode(self, prompt: Any, where: str) -> list[int]:
        """Ids of one prompt."""
        messages = self.messages(prompt, where)
        return self.token_ids([self.render(messages, where)], is_chat=not isinstance(messages, str))[0]


def pad_id(tokenizer: Any) -> int:
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)


def pad_prompt(ids: Sequence[int], tokenizer: Any, width: int) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask` and `position_ids` of one prompt, left-padded."""
    input_ids = torch.full((width,), pad_id(tokenizer), dtype=torch.int64)
    mask = torch.zeros(width, dtype=torch.int64)
    input_ids[width - len(ids) :] = torch.tensor(ids, dtype=torch.int64)
    mask[width - len(ids) :] = 1
    return {"input_ids": input_ids, "attention_mask": mask, "position_ids": (mask.cumsum(0) - 1).clamp(min=0)}


def truncate(ids: Sequence[int], limit: int, truncation: Truncation, where: str) -> list[int]:
    """At most `limit` ids. `left` drops the beginning, `right` the end, `middle` keeps both ends."""
    if len(ids) <= limit:
        return list(ids)
    if truncation == "left":
        return list(ids[-limit:])
    if truncation == "right":
        return list(ids[:limit])
    if truncation == "middle":
        head = limit // 2
        return [*ids[:head], *ids[len(ids) - (limit - head) :]]
    raise DataError(f"{where}: {too_long(len(ids), limit)}")


def too_long(num_tokens: int, limit: int) -> str:
    """What to say of a prompt that may not be cut."""
    return (
        f"the prompt has {num_tokens} tokens, more than data.max_prompt_length={limit}; raise it to {num_tokens}, set "
        "data.filter_overlong_prompts=True to leave such prompts out, or data.truncation=left to cut."
    )


def is_message(entry: Any) -> bool:
    """A template would write nothing for a role or a content that is not there."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
        return False
    return entry.get("content") is not None or entry.get("tool_calls") is not None


def short(value: Any, limit: int = 80) -> str:
    """As Python writes it; what is longer is cut, and closed by its own quote or bracket."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 4]}...{text[-1]}"


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


def with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Parts that are all text as one text: many templates would write the list as Python shows it."""
    content = message.get("content")
    parts = content if isinstance(content, (list, tuple)) else []
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and _is_text(part)]
    return {**message, "content": "".join(texts)} if texts and len(texts) == len(parts) else message


def with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A text as the one part of its message."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def reads_parts_alone(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> bool:
    """Whether the chat template leaves out a text that is no list of parts, without a word (LLaVA's, Idefics')."""
    from jinja2 import TemplateError

    shown = []
    for message in (_PROBE, with_parts(_PROBE)):
        try:
            text = tokenizer.apply_chat_template([message], tokenize=False, **template_kwargs)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError):
            text = ""
        shown.append(_PROBE["content"] in text)
    return shown == [False, True]


def listed_media(row: Mapping[str, Any], key: str) -> list[Any]:
    """A row's images or videos."""
    value = row.get(key)
    if isinstance(value, (str, bytes, Mapping)) and value:
        raise DataError(f"{key} is {short(value)}; it must be a list, with an entry for each <image> or <video>.")
    media = [] if value is None or isinstance(value, (str, bytes, Mapping)) else list(value)
    for entry in media:
        if not entry if isinstance(entry, (str, bytes)) else entry is None or isinstance(entry, (int, float)):
            raise DataError(
                f"{key} holds {short(entry)}; each of its entries must be a path, the bytes of a file, or a dict with "
                "one of them as `path` or `bytes`."
            )
    return media


def media_kinds(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The types of all parts of messages that are no text: `image`, `video`, `image_url`, `input_audio`, ..."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
    kinds = [str(part.get("type")) for part in parts if isinstance(part, Mapping)]
    return [kind for kind in kinds if re.search("image|video|audio", kind)]


def count_media(messages: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """How many images and videos the parts of messages stand for."""
    kinds = media_kinds(list(messages))
    return kinds.count("image"), kinds.count("video")


def place_media(messages: Messages, num_images: int, num_videos: int, where: str) -> Messages:
    """Replace `<image>` and `<video>` in the texts by the parts that chat templates understand, and count them."""
    placed, counts = [], {"image": 0, "video": 0}
    if other := [kind for kind in media_kinds(messages) if kind not in counts]:
        raise DataError(
            f"{where}: a part of the prompt has the type {other[0]!r}, which would be left out; write "
            '{"type": "image"} (or "video") in its place, and the image itself into the column of data.image_key '
            "(data.video_key)."
        )
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
                f"{where}: the prompt names <{kind}> {counts[kind]} times and the row has {wanted} {kind}s "
                f"(data.{kind}_key); they must be as many."
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
    processor: Any,
    messages: Messages,
    images: list[Any],
    videos: list[Any],
    where: str,
    *,
    processor_kwargs: Mapping[str, Any],
    **template_kwargs: Any,
) -> MediaPrompt:
    """Fill in the chat template and run the processor with `processor_kwargs` (`data.mm_processor_kwargs`)."""
    parts = place_media(messages, len(images), len(videos), where)
    text = processor.apply_chat_template(parts, add_generation_prompt=True, tokenize=False, **template_kwargs)
    inputs = run_processor(processor, text, images, videos, where, processor_kwargs)
    return MediaPrompt(
        text=text,
        ids=inputs["input_ids"][0].tolist(),
        inputs={name: value for name, value in inputs.items() if name not in _TEXT_INPUTS},
        media={name: values for name, values in (("image", images), ("video", videos)) if values},
    )


def run_processor(
    processor: Any,
    text: str,
    images: list[Any],
    videos: list[Any],
    where: str,
    processor_kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """All tensors that a processor, with `data.mm_processor_kwargs`, makes of a rendered text and what its placeholders
    stand for."""
    given = {name: values for name, values in (("images", images), ("videos", videos)) if values}
    settings = {"return_tensors": "pt", "add_special_tokens": False, **processor_kwargs}
    try:
        return dict(processor(text=[text], **given, **settings))
    except (TypeError, ValueError) as error:
        if not processor_kwargs:
            raise
        asked = f"data.mm_processor_kwargs={dict(processor_kwargs)}"
        raise DataError(f"{where}: the model's processor fails with {asked}: {error}") from error


def media_tensors(
    processor: Any, images: list[Any], videos: list[Any], where: str, processor_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """What a model reads beside its ids, in the order of the images and videos."""
    content = [{"type": "image"} for _ in images] + [{"type": "video"} for _ in videos]
    messages = [{"role": "user", "content": content}]
    return process_media(processor, messages, images, videos, where, processor_kwargs=processor_kwargs).inputs


def open_image(source: Any, load: Loader = load_image) -> Any:
    """The image of an entry of a row; an error that names the entry where it cannot be opened."""
    try:
        return load(source)
    except OSError as error:  # also what is no image
        raise DataError(f"the image {short(source)} cannot be opened: {error}") from error


def _part(piece: str) -> dict[str, str]:
    return {"type": piece[1:-1]} if _PLACE.fullmatch(piece) else {"type": "text", "text": piece}


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)
