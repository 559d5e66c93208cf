"""Prompts from files: same prompts in every format, tokens as the chat template writes them, clear errors."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.config import DovetailConfig
from dovetail.data.build import build_train_loader
from dovetail.data.encode import PromptEncoder, short, truncate
from dovetail.data.errors import DataError
from dovetail.data.files import write_rows
from dovetail.protocol import validate_stage
from tests.data.prompt_files import dataset, rows, save_dataset_folder, toy_file
from tests.models.tiny import tiny_tokenizer

pytestmark = pytest.mark.unit


def test_every_format_gives_the_same_batch(tmp_path: Path) -> None:
    content = rows(5)
    files = [
        str(write_rows(content, tmp_path / "a.parquet")),
        str(write_rows(content, tmp_path / "a.jsonl")),
        str(save_dataset_folder(tmp_path / "folder", content)),
        str(save_dataset_folder(tmp_path / "reversed", content[::-1], order=[4, 3, 2, 1, 0])),
    ]
    (tmp_path / "list.json").write_text(json.dumps(content))
    batches = [dataset(file).batch(range(5)) for file in [*files, str(tmp_path / "list.json")]]
    assert [batches[0].difference(batch) for batch in batches[1:]] == [None] * 4


def test_a_batch_has_the_columns_of_the_schema(tmp_path: Path) -> None:
    batch = dataset(toy_file(tmp_path, 3)).batch([2, 0])
    validate_stage(batch, "dataset", done=True)
    assert batch.non_tensor_batch["index"].tolist() == [2, 0]
    assert [info["index"] for info in batch.non_tensor_batch["extra_info"]] == [2, 0]
    assert batch.non_tensor_batch["reward_model"][0]["ground_truth"] == "2"
    assert batch.non_tensor_batch["ability"].tolist() == ["math", "math"]


def test_a_file_as_trl_has_it_needs_no_data_source_when_a_function_scores(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2 + 2?"}]
    lines = [{"prompt": chat, "ground_truth": "4", "level": 1}, {"prompt": "say hi", "level": 2}]
    file = tmp_path / "trl.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = dataset(str(file), requires_ground_truth=False)
    batch = made.batch([0, 1])
    assert batch.non_tensor_batch["data_source"].tolist() == ["custom", "custom"]
    assert made.data_sources() == ["custom"]
    assert batch.non_tensor_batch["reward_model"].tolist() == [{"ground_truth": "4"}, None]
    assert [info["level"] for info in batch.non_tensor_batch["extra_info"]] == [1, 2]
    with pytest.raises(DataError, match=r"no column 'data_source', only prompt, ground_truth.*custom_reward_function"):
        dataset(str(file))
    with pytest.raises(DataError, match="no column 'source'"):
        dataset(str(file), requires_ground_truth=False, reward_fn_key="source")


def test_tokens_are_those_of_the_chat_template_padded_on_the_left(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    batch = dataset(toy_file(tmp_path, 1), return_full_prompt=True).batch([0])
    messages = [{"role": "user", "content": "toy 0 xxxx"}]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    ids, mask = batch.tensors["input_ids"][0], batch.tensors["attention_mask"][0]
    assert ids.shape == (64,)
    assert ids[mask.bool()].tolist() == wanted == batch.non_tensor_batch["raw_prompt_ids"][0]
    assert mask.tolist() == [0] * (64 - len(wanted)) + [1] * len(wanted)
    assert batch.tensors["position_ids"][0, -len(wanted) :].tolist() == list(range(len(wanted)))
    assert batch.non_tensor_batch["full_prompts"][0] == "user: toy 0 xxxx</s>assistant: "
    assert batch.non_tensor_batch["raw_prompt"][0] == messages


def test_a_plain_text_is_a_user_message_or_mere_text_without_a_template(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"prompt": "hello", "data_source": "toy", "reward_model": {"ground_truth": "1"}}) + "\n")
    bare = tiny_tokenizer()
    bare.chat_template = None
    assert dataset(str(file), return_full_prompt=True)[0]["full_prompts"] == "user: hello</s>assistant: "
    assert dataset(str(file), tokenizer=bare, return_full_prompt=True)[0]["full_prompts"] == "hello"


def test_template_arguments_and_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ thinking }}|{{ tools[0].name }}|{{ messages[0].content }}"
    made = dataset(
        toy_file(tmp_path, 1),
        tokenizer=tokenizer,
        apply_chat_template_kwargs={"thinking": "off"},
        tools=[{"name": "calc"}],
        return_full_prompt=True,
    )
    assert made[0]["full_prompts"] == "off|calc|toy 0 xxxx"


def test_calls_in_a_prompt_have_only_their_own_arguments() -> None:
    """Arrow gives each call the arguments of all calls."""
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo", "terms": None}}, "id": None}
    encoder = PromptEncoder(tiny_tokenizer(), {})
    (message,) = encoder.messages([{"role": "assistant", "content": None, "tool_calls": [call]}], "row 0")
    own = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert message == {"role": "assistant", "tool_calls": [own]}


def test_truncation_cuts_where_it_says() -> None:
    ids = list(range(10))
    assert truncate(ids, 4, "left", "row") == [6, 7, 8, 9]
    assert truncate(ids, 4, "right", "row") == [0, 1, 2, 3]
    assert truncate(ids, 5, "middle", "row") == [0, 1, 7, 8, 9]
    assert truncate(ids, 1, "middle", "row") == [9]
    assert truncate(ids, 10, "error", "row") == ids


def test_a_long_prompt_is_an_error_that_names_the_row_and_the_fix(tmp_path: Path) -> None:
    file = toy_file(tmp_path, 2, length=80)
    with pytest.raises(DataError, match=r"toy\.parquet row 1: the prompt has 104 tokens.*raise it to 104.*filter_over"):
        dataset(file)
    assert dataset(file, truncation="left")[1]["attention_mask"].sum() == 64


def test_the_filter_leaves_out_long_prompts_and_says_how_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = [toy_file(tmp_path, 3, "short.parquet"), toy_file(tmp_path, 2, "long.parquet", length=80)]
    with caplog.at_level(logging.INFO):
        made = dataset(files, filter_overlong_prompts=True)
    assert made.source_sizes == [3, 0]
    assert "long.parquet: 2 of 2 prompts are longer" in caplog.text


def test_several_files_stand_one_after_the_other_and_miss_columns_as_none(tmp_path: Path) -> None:
    extra = [{**row, "agent_name": "tool"} for row in rows(2, source="b")]
    made = dataset([toy_file(tmp_path, 3), str(write_rows(extra, tmp_path / "b.jsonl"))])
    batch = made.batch([2, 3])
    assert batch.non_tensor_batch["data_source"].tolist() == ["toy", "b"]
    assert batch.non_tensor_batch["agent_name"].tolist() == [None, "tool"]
    assert made.data_sources() == ["toy", "b"]
    with pytest.raises(IndexError, match="prompt 5"):
        made[5]


def test_max_samples_takes_the_first_rows_or_a_seeded_choice(tmp_path: Path) -> None:
    file = toy_file(tmp_path, 50)

    def chosen(**options: Any) -> list[int]:
        made = dataset(file, max_samples=5, **options)
        return [made[i]["extra_info"]["index"] for i in range(len(made))]

    assert chosen(shuffle=False) == [0, 1, 2, 3, 4]
    assert chosen(seed=1) == chosen(seed=1) != chosen(seed=2)


def test_the_fingerprint_follows_content_and_filters(tmp_path: Path) -> None:
    a, b = toy_file(tmp_path, 4, "a.parquet"), toy_file(tmp_path, 5, "b.parquet")
    assert dataset(a).fingerprint == dataset(a, truncation="left").fingerprint
    assert len({dataset(a).fingerprint, dataset(b).fingerprint, dataset(a, max_samples=3).fingerprint}) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"prompt_key": "question"},
            r"toy\.parquet has no column 'question', only data_source, prompt.*data\.prompt_key",
        ),
        ({"reward_fn_key": "source"}, r"no column 'source'.*data\.reward_fn_key"),
        ({"max_samples": 0}, r"none of 3 prompts is left"),
        ({"filter_overlong_prompts": True, "max_prompt_length": 3}, r"longer than data\.max_prompt_length=3"),
    ],
)
def test_unusable_data_is_a_clear_error(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        dataset(toy_file(tmp_path, 3), **change)


def test_unusable_files_are_clear_errors(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (tmp_path / "list.jsonl").write_text("3\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    cases = {
        "missing.parquet": "there is no file",
        "What is 1+1? " * 30: "there is no file",
        "bad.jsonl": r"bad\.jsonl:2 is not JSON",
        "list.jsonl": "every line must be a JSON object",
        "empty.jsonl": "there are no rows",
        "bad.parquet": "not a readable parquet file",
        "dict": "holds the splits train, test",
    }
    for name, words in cases.items():
        with pytest.raises(DataError, match=words):
            dataset(str(tmp_path / name))
    with pytest.raises(DataError, match=r"data\.train_files"):
        dataset([])


def test_a_row_without_truth_or_with_a_strange_prompt_is_named(tmp_path: Path) -> None:
    good = {"prompt": "a", "data_source": "toy", "reward_model": {"ground_truth": "1"}}
    file = tmp_path / "rows.jsonl"
    strange = [
        {"reward_model": {}}, {"prompt": 3}, {"reward_model": {"ground_truth": None}},
        {"prompt": [{"content": "a"}]}, {"prompt": [{"role": "user"}]}, {"extra_info": '{"level": 1}'},
        {"images": ["a.png"]},
    ]  # fmt: skip
    file.write_text("\n".join(json.dumps({**good, **change}) for change in ({}, *strange)))
    with pytest.raises(DataError, match="7 rows cannot be used") as caught:
        dataset(str(file))
    lines = str(caught.value).splitlines()
    reasons = [
        r"row 1: reward_model is \{\}",
        r"row 2: the prompt is 3",
        r"row 3: reward_model is \{'ground_truth': None\}.*custom_reward_function",
        r"row 4: the prompt is .* messages with role and content",
        r"row 5: the prompt is .* messages with role and content",
        r"row 6: extra_info is .* must be a dict",
        r"row 7: it has images or videos, but the model has no processor",
        r"set data\.skip_bad_rows=True to leave them out",
    ]
    assert len(lines) == 1 + len(reasons)
    for line, reason in zip(lines[1:], reasons, strict=True):
        assert re.search(reason, line), line
    kept = dataset(str(file), skip_bad_rows=True)
    assert len(kept) == 1
    assert kept[0]["reward_model"] == {"ground_truth": "1"}


class FakeProcessor:
    """Widens each image to as many tokens as it has pixels."""

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        parts = [part for message in messages for part in message["content"]]
        return "".join(part["text"] if part["type"] == "text" else "#" for part in parts)

    def __call__(
        self, text: list[str], images: list[Any] | None = None, max_pixels: int = 99, **_: Any
    ) -> dict[str, torch.Tensor]:
        if max_pixels < 1:
            raise ValueError("max_pixels must be positive")
        images = [image[:max_pixels] for image in images or []]
        sizes = [len(image) for image in images]
        pieces = text[0].split("#")
        widened = "".join(piece + "#" * size for piece, size in zip(pieces, [*sizes, 0], strict=True))
        ids = tiny_tokenizer()(widened, add_special_tokens=False)["input_ids"]
        pixels = torch.cat([torch.as_tensor(image, dtype=torch.float32) for image in images])
        of_text = {name: torch.ones(1, len(ids)) for name in ("attention_mask", "mm_token_type_ids")}
        return {"input_ids": torch.tensor([ids]), **of_text, "pixel_values": pixels}


def image_file(tmp_path: Path, prompt: str = "see <image>, compare <image>") -> str:
    row = {
        "prompt": [{"role": "user", "content": prompt}],
        "data_source": "toy",
        "reward_model": {"ground_truth": "1"},
        "images": [{"path": "3"}, {"path": "5"}],
    }
    file = tmp_path / "images.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps({**row, "prompt": "text only", "images": None}) + "\n")
    return str(file)


def load(source: dict[str, Any]) -> np.ndarray:
    return np.ones(int(source["path"]))


def test_images_become_placeholders_tensors_and_raw_data(tmp_path: Path) -> None:
    made = dataset(image_file(tmp_path), processor=FakeProcessor(), image_loader=load)
    batch = made.batch([0, 1])
    validate_stage(batch, "dataset", done=True)
    decode = tiny_tokenizer().decode
    assert decode(batch.tensors["input_ids"][0], skip_special_tokens=True) == "see ###, compare #####"
    assert decode(batch.non_tensor_batch["raw_prompt_ids"][0]) == "see #, compare #"
    assert [len(image) for image in batch.non_tensor_batch["multi_modal_data"][0]["image"]] == [3, 5]
    assert batch.non_tensor_batch["multi_modal_inputs"][0]["pixel_values"].shape == (8,)
    assert batch.non_tensor_batch["multi_modal_inputs"][1] == {}


def test_the_processor_gets_its_extra_arguments_and_what_it_refuses_is_named(tmp_path: Path) -> None:
    options: dict[str, Any] = {"processor": FakeProcessor(), "image_loader": load}
    row = dataset(image_file(tmp_path), mm_processor_kwargs={"max_pixels": 2}, **options)[0]
    assert tiny_tokenizer().decode(row["input_ids"], skip_special_tokens=True) == "see ##, compare ##"
    assert row["multi_modal_inputs"]["pixel_values"].shape == (4,)
    refused = dataset(image_file(tmp_path), mm_processor_kwargs={"max_pixels": 0}, **options)
    with pytest.raises(DataError, match=r"data.mm_processor_kwargs=.'max_pixels': 0.: max_pixels must be positive"):
        refused[0]


def test_rows_with_sounds_are_refused_before_the_first_step(tmp_path: Path) -> None:
    row = {"prompt": "hear <audio>", "data_source": "toy", "reward_model": {"ground_truth": "1"}, "audios": ["a.wav"]}
    file = write_rows([row, {**row, "audios": []}], tmp_path / "sounds.jsonl")
    with pytest.raises(DataError, match=r"row 0: it has sounds \(column audios\), which no model is given here"):
        dataset(str(file), processor=FakeProcessor())
    assert dataset(str(file), skip_bad_rows=True).source_sizes == [1]


def test_prompts_of_a_file_with_images_have_the_same_columns_with_and_without(tmp_path: Path) -> None:
    made = dataset(image_file(tmp_path), processor=FakeProcessor(), image_loader=load)
    assert set(made[0]) == set(made[1])
    assert "mm_token_type_ids" not in made[0]["multi_modal_inputs"]
    assert made.batch([1]).non_tensor_batch["multi_modal_data"][0] == {}
    assert "multi_modal_inputs" not in dataset(toy_file(tmp_path, 1), processor=FakeProcessor()).batch([0])


def test_image_prompts_are_filtered_by_their_widened_length_and_never_cut(tmp_path: Path) -> None:
    options: dict[str, Any] = {"processor": FakeProcessor(), "image_loader": load, "max_prompt_length": 20}
    with pytest.raises(DataError, match="row 0: the prompt has 22 tokens"):
        dataset(image_file(tmp_path), truncation="left", **options)[0]
    options |= {"max_prompt_length": 30, "filter_overlong_prompts": True}
    assert dataset(image_file(tmp_path, "<image>" + "y" * 22 + "<image>"), **options).source_sizes == [2]
    assert dataset(image_file(tmp_path, "<image>" + "y" * 23 + "<image>"), **options).source_sizes == [1]


def test_as_many_images_as_places_are_wanted_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 0: the prompt names <image> 1 times and the row has 2 images"):
        dataset(image_file(tmp_path, "one <image>"), processor=FakeProcessor(), image_loader=load)
    with pytest.raises(DataError, match="no processor"):
        dataset(image_file(tmp_path))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image> what", "images": []}, "names <image> 1 times and the row has 0 images .data.image_key."),
        ({"prompt": "what", "images": ["3"]}, "names <image> 0 times and the row has 1 images"),
        ({"prompt": [{"type": "image", "image": "3"}]}, "names <image> 1 times and the row has 0 images"),
        ({"prompt": [{"type": "image_url", "image_url": {"url": "3"}}]}, "has the type 'image_url', which would be"),
        ({"prompt": "<image> what", "images": "3"}, "images is '3'; it must be a list"),
        ({"prompt": "<image> what", "images": [3]}, "row 0: images holds 3; each of its entries must be a path, the"),
        ({"prompt": "<image> what", "images": [None]}, "row 0: images holds None"),
    ],
)
def test_an_image_that_the_model_would_not_see_is_refused(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": row["prompt"]}]
    file = write_rows([{**row, "prompt": prompt, "data_source": "toy"}], tmp_path / "a.jsonl")
    options: dict[str, Any] = {"image_loader": load, "requires_ground_truth": False}
    with pytest.raises(DataError, match=message):
        dataset(str(file), processor=FakeProcessor(), **options)
    if row["prompt"] != "<image> what":
        with pytest.raises(DataError, match="no processor"):
            dataset(str(file), **options)


def test_parts_that_are_all_text_are_the_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "say "}, {"type": "text", "text": "7"}]
    prompts = [[{"role": "user", "content": content}] for content in (parts, "say 7")]
    file = write_rows([{"prompt": prompt, "data_source": "toy"} for prompt in prompts], tmp_path / "a.jsonl")
    made = dataset(str(file), requires_ground_truth=False)
    assert made[0]["raw_prompt_ids"] == made[1]["raw_prompt_ids"]


def test_without_a_column_of_images_the_mark_is_text(tmp_path: Path) -> None:
    file = write_rows([{"prompt": "the tag <image>", "data_source": "toy"}], tmp_path / "a.jsonl")
    assert len(dataset(str(file), processor=FakeProcessor(), requires_ground_truth=False)) == 1


def test_an_image_that_cannot_be_opened_is_named_with_its_row(tmp_path: Path) -> None:
    row = {"prompt": "<image> what", "data_source": "toy", "images": [str(tmp_path / "nothing.png")]}
    file = write_rows([row], tmp_path / "a.jsonl")
    made = dataset(str(file), processor=FakeProcessor(), requires_ground_truth=False)
    with pytest.raises(DataError, match=r"row 0: the image '.* cannot be opened: .*nothing\.png"):
        made[0]
    row["images"] = [{"path": None, "url": "a"}]
    made = dataset(str(write_rows([row], tmp_path / "b.jsonl")), processor=FakeProcessor(), requires_ground_truth=False)
    with pytest.raises(DataError, match=r"b\.jsonl row 0: an image has neither bytes nor path, only path, url"):
        made[0]


def test_a_long_value_is_cut_and_closed() -> None:
    assert short("a" * 78) == repr("a" * 78)
    assert short("a" * 79) == repr("a" * 75 + "...")
    assert short(["a" * 79]) == f"['{'a' * 74}...]"


def test_tools_are_in_prompts_with_images_too(tmp_path: Path) -> None:
    class WithTools(FakeProcessor):
        def apply_chat_template(self, messages: Any, tools: Any = (), **_: Any) -> str:
            return "".join(tool["name"] for tool in tools) + super().apply_chat_template(messages)

    made = dataset(image_file(tmp_path), processor=WithTools(), image_loader=load, tools=[{"name": "calc"}])
    assert tiny_tokenizer().decode(made[0]["raw_prompt_ids"]).startswith("calc")


def test_a_row_may_leave_its_data_source_empty(tmp_path: Path) -> None:
    rows_of_both = [{**row, "data_source": source} for row, source in zip(rows(2), ("toy", None), strict=True)]
    made = dataset(str(write_rows(rows_of_both, tmp_path / "a.parquet")), requires_ground_truth=False)
    assert made.data_sources() == ["toy", "custom"]
    assert made.batch([0, 1]).non_tensor_batch["data_source"].tolist() == ["toy", "custom"]


def test_a_text_of_no_token_is_refused_before_the_first_step(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    file = write_rows([{"prompt": text, "data_source": "toy"} for text in ("say", "")], tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="row 1: the prompt is ''"):
        dataset(str(file), tokenizer=tokenizer, requires_ground_truth=False)


def test_train_weights_of_the_config_set_the_share_of_each_file(tmp_path: Path) -> None:
    files = []
    for name, count in (("a", 30), ("b", 10)):
        content = [{**row, "data_source": name} for row in rows(count)]
        files.append(str(write_rows(content, tmp_path / f"{name}.parquet")))
    data = {"train_files": files, "train_weights": [1, 3], "train_batch_size": 40, "max_prompt_length": 64}
    config = DovetailConfig(data=data, custom_reward_function={"path": "unused.py"})
    batch = build_train_loader(config, tiny_tokenizer()).next_batch()
    assert Counter(batch.non_tensor_batch["data_source"]) == {"a": 10, "b": 30}
    with pytest.raises(DataError, match=r"data\.train_weights=\[1\.0\] does not fit 2 files"):
        build_train_loader(DovetailConfig(data={**data, "train_weights": [1]}), tiny_tokenizer())


@pytest.mark.parametrize(("filters", "prompts"), [({}, 2), ({"enable": True, "metric": "acc"}, 6)])
def test_only_dynamic_sampling_draws_prompts_by_the_generation_batch(
    tmp_path: Path, filters: dict[str, Any], prompts: int
) -> None:
    data = {"train_files": toy_file(tmp_path, 12), "train_batch_size": 2, "gen_batch_size": 6, "max_prompt_length": 64}
    config = DovetailConfig(data=data, algorithm={"filter_groups": filters})
    assert len(build_train_loader(config, tiny_tokenizer()).next_batch()) == prompts


def test_a_template_that_reads_lists_of_parts_alone_is_given_them(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    )
    made = dataset(toy_file(tmp_path, 1), tokenizer=tokenizer, return_full_prompt=True)
    assert made[0]["full_prompts"] == "<toy 0 xxxx>"
