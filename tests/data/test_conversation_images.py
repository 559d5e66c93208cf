"""Conversations with images as token rows: placeholders as wide as their images, and the tensors of the model."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from PIL import Image

from dovetail.agents.chat import ChatRenderer
from dovetail.agents.chat_media import MediaRenderer
from dovetail.config.data import DataConfig
from dovetail.config.methods import SFTConfig
from dovetail.data.conversations import ConversationDataset, conversation_rows
from dovetail.data.encode import place_media
from dovetail.data.errors import DataError
from dovetail.data.files import ListRows
from dovetail.models.load import load_processor, load_tokenizer
from tests.models.tiny import IMAGE_TOKEN, save_tiny_vision_model

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = save_tiny_vision_model(tmp_path_factory.mktemp("images"))
    return load_tokenizer(folder), load_processor(folder, trust_remote_code=True)


def opened(readers: tuple[Any, Any], *rows: dict[str, Any], **data: Any) -> ConversationDataset:
    renderer = MediaRenderer(*readers)
    config = DataConfig(**{"max_length": 512, **data})
    source = [ListRows("rows", "0", list(rows))], readers[0], renderer, config
    return ConversationDataset(*source, sft=SFTConfig(), processor=readers[1])


def picture(colour: str, size: tuple[int, int] = (16, 16)) -> dict[str, bytes]:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return {"bytes": file.getvalue()}


def said(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


PICTURES = [picture("red"), picture("green", (16, 32)), picture("blue")]
TALK = said("<image> or <image>", "the first", "and <image>?", "blue")


def test_ids_are_those_of_the_processor_and_answers_alone_are_trained(readers: tuple[Any, Any]) -> None:
    """The last image comes in a later turn: it is appended, and widened there."""
    data = opened(readers, {"messages": TALK, "images": PICTURES})
    ((row,), (tokenizer, processor)) = data[0], readers
    parts = [
        {"role": message["role"], "content": [{"type": "image"} if piece == "I" else {"type": "text", "text": piece}
         for piece in pieces]}
        for message, pieces in zip(TALK, (["I", " or ", "I"], ["the first"], ["and ", "I", "?"], ["blue"]), strict=True)
    ]  # fmt: skip
    text = processor.apply_chat_template(parts, tokenize=False)
    images = [Image.open(io.BytesIO(entry["bytes"])) for entry in PICTURES]
    whole = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    assert row.ids == whole["input_ids"][0].tolist()
    assert row.ids.count(IMAGE_TOKEN) == 4 + 8 + 4
    trained = tokenizer.decode([token for token, own in zip(row.ids, row.mask, strict=True) if own])
    assert trained == "the first</s>blue</s>"
    (tensors,) = data.batch([0]).non_tensor_batch["multi_modal_inputs"]
    assert set(tensors) == {"pixel_values", "image_grid_thw"}
    assert torch.equal(tensors["pixel_values"], whole["pixel_values"])
    assert torch.equal(tensors["image_grid_thw"], whole["image_grid_thw"])


def test_rows_of_text_have_the_column_where_others_have_images(readers: tuple[Any, Any]) -> None:
    text = {"messages": said("hi", "hello")}
    asked = {"prompt": "<image> what", "response": "red", "images": PICTURES[:1]}
    batch = opened(readers, text, asked).batch([0, 1])
    assert [sorted(row) for row in batch.non_tensor_batch["multi_modal_inputs"]] == [
        [],
        ["image_grid_thw", "pixel_values"],
    ]
    assert not opened(readers, text).has_media
    assert "multi_modal_inputs" not in opened(readers, text).batch([0])


def test_another_image_is_another_content(readers: tuple[Any, Any]) -> None:
    first, other = (
        opened(readers, {"prompt": "<image>", "response": "a", "images": [picture(colour)]})
        for colour in ("red", "blue")
    )
    assert first[0][0].ids == other[0][0].ids
    assert first.content_digest([0]) != other.content_digest([0])


def test_a_row_after_a_rewrite_has_the_images_so_far(readers: tuple[Any, Any]) -> None:
    """A template that shows the last user's message alone begins each answer anew."""
    tokenizer, processor = readers
    template = "{% for m in messages %}{% if loop.last or not loop.first or messages|length < 3 %}" + str(
        tokenizer.chat_template
    ).partition("%}")[2].replace("{% endfor %}{% if add", "{% endif %}{% endfor %}{% if add")
    renderer = MediaRenderer(tokenizer, processor, chat_template=template)
    talk = said("first", "one", "<image>", "two", "<image>", "three")
    rows = ListRows("rows", "0", [{"messages": talk, "images": PICTURES[:2]}])
    config = DataConfig(max_length=512)
    data = ConversationDataset([rows], tokenizer, renderer, config, sft=SFTConfig(), processor=processor)
    assert [row.media for row in data[0]] == [(0, 0), (2, 0)]
    assert [row.ids.count(IMAGE_TOKEN) for row in data[0]] == [0, 4 + 8]
    grids = [row.get("image_grid_thw", []) for row in data.batch([0]).non_tensor_batch["multi_modal_inputs"]]
    assert [len(grid) for grid in grids] == [0, 2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": said("<image>", "a")}, None),
        ({"messages": said("<image>", "a"), "images": PICTURES[:2]}, "names <image> 1 times and the row has 2 images"),
        ({"messages": said("hi", "a <image>"), "images": PICTURES[:1]}, "assistant's message holds an image"),
        ({"messages": said("<image> </s>", "a"), "images": PICTURES[:1]}, "holds markup of the chat template as text"),
        ({"messages": said("<image>", "a"), "images": [b"no picture"]}, "cannot be opened"),
        ({"messages": said("<image>", "a" * 600), "images": PICTURES[:1]}, "a row with images is not cut"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, *said("", "a")[1:]]}, "row has 0 images"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, *said("", "a")[1:]]}, "'image_url'"),
    ],
    ids=["text", "count", "assistant", "markup", "broken", "long", "no_column", "url"],
)
def test_a_row_that_cannot_be_trained_is_named(
    readers: tuple[Any, Any], row: dict[str, Any], message: str | None
) -> None:
    if message is None:  # in a row without images the word is text
        assert opened(readers, row)[0][0].media == (0, 0)
        return
    with pytest.raises(DataError, match=f"row 0: .*{message}"):
        opened(readers, row, truncation="right")


def test_a_model_of_text_refuses_images(readers: tuple[Any, Any]) -> None:
    rows = ListRows("rows", "0", [{"messages": TALK, "images": PICTURES}])
    config = DataConfig(max_length=512)
    with pytest.raises(DataError, match="row 0: it has images or videos, and the model has no processor"):
        ConversationDataset([rows], readers[0], ChatRenderer(readers[0]), config, sft=SFTConfig())


def test_a_processor_is_given_images_with_their_placeholders_alone(readers: tuple[Any, Any]) -> None:
    """LLaVA's and Gemma 3's refuse a text that has fewer; the answer before a later image is text."""
    tokenizer, processor = readers

    class Strict:
        def __call__(self, text: list[str], images: Any = (), **settings: Any) -> Any:
            assert text[0].count("<|image_pad|>") == len(images)
            return processor(text=text, images=images, **settings)

    renderer = MediaRenderer(tokenizer, Strict()).with_media(PICTURES, [])
    talk = place_media(TALK, 3, 0, "messages")
    ((ids, *_),) = conversation_rows(renderer, talk)
    assert ids == opened(readers, {"messages": TALK, "images": PICTURES})[0][0].ids
