"""Preference rows in the shapes people have them, as token ids with a mask, and the rows that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.agents.chat import ChatRenderer
from dovetail.config.data import DataConfig
from dovetail.data.errors import DataError
from dovetail.data.files import write_rows
from dovetail.data.preferences import Labelled, Pair, PreferenceDataset
from tests.agents.tokenizers import family_tokenizer

pytestmark = pytest.mark.unit

USER = {"role": "user", "content": "Say hi."}
GOOD, BAD = {"role": "assistant", "content": "hi"}, {"role": "assistant", "content": "no"}
TOOL = {"role": "tool", "name": "look_up", "content": "found"}
TEXT = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"


def dataset(folder: Path, *rows: Any, family: str | None = "smollm2", labelled: bool = False, **keys: Any) -> Any:
    file = write_rows(rows, folder / "rows.jsonl")
    tokenizer = family_tokenizer(family or "smollm2")
    config = DataConfig(**{"max_prompt_length": 200, "max_response_length": 100, **keys})
    renderer = ChatRenderer(tokenizer) if family else None
    return PreferenceDataset([str(file)], tokenizer, renderer, config, labelled=labelled)


def texts(example: Any, family: str = "smollm2") -> tuple[str, str, str]:
    decode = family_tokenizer(family).decode
    return decode(example.prompt), decode(example.chosen.ids), decode(example.rejected.ids)


SHAPES: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Say hi.", "chosen": "hi", "rejected": "no"},
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "a message": {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
    "messages and texts": {"prompt": [USER], "chosen": "hi", "rejected": "no"},
    "implicit prompt": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "prompt repeated in the responses": {"prompt": "Say hi.", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "None for keys of other rows": {"prompt": None, "chosen": [{**USER, "name": None}, GOOD], "rejected": [USER, BAD]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pair_is_the_templates_prompt_and_two_responses_with_their_stop_token(tmp_path: Path, shape: str) -> None:
    prompt, chosen, rejected = texts(dataset(tmp_path, SHAPES[shape])[0])
    assert prompt.endswith(TEXT)
    assert (chosen, rejected) == ("hi<|im_end|>", "no<|im_end|>")


def test_a_system_message_of_the_prompt_need_not_be_repeated(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be kind."}
    row = {"prompt": [system, USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}
    prompt, chosen, _ = texts(dataset(tmp_path, row)[0])
    assert "Be kind." in prompt
    assert prompt.count("Say hi.") == 1
    assert chosen == "hi<|im_end|>"


def test_a_tokenizer_that_begins_and_ends_texts_with_one_token_ends_no_prompt(tmp_path: Path) -> None:
    class Closing:
        """Writes its end of sequence around every text, as some tokenizers do."""

        def __init__(self) -> None:
            self.own = family_tokenizer("smollm2")
            self.eos_token_id = self.pad_token_id = self.own.eos_token_id

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [self.eos_token_id, *self.encode(text), self.eos_token_id]}

        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            return self.own.encode(text, add_special_tokens=False)

    file = write_rows([{"prompt": "Say hi.", "chosen": "hi", "rejected": "no"}], tmp_path / "rows.jsonl")
    tokenizer = Closing()
    (pair,) = PreferenceDataset([str(file)], tokenizer, None, DataConfig())
    assert pair.prompt == [tokenizer.eos_token_id, *tokenizer.encode("Say hi.")]


def test_texts_without_a_prompt_share_their_beginning_and_get_no_template(tmp_path: Path) -> None:
    row = {"chosen": "Human: name it\nAssistant: the name", "rejected": "Human: name it\nAssistant: their word"}
    for family in ("smollm2", None):
        example = dataset(tmp_path, row, family=family)[0]
        eos = family_tokenizer("smollm2").eos_token
        prompt, chosen, rejected = texts(example)
        assert prompt + chosen == row["chosen"] + eos
        assert prompt + rejected == row["rejected"] + eos
        assert not prompt.endswith(" ")


def test_a_response_of_several_messages_trains_the_models_own_tokens_only(tmp_path: Path) -> None:
    long = [GOOD, TOOL, {"role": "assistant", "content": "so it is"}]
    example = dataset(tmp_path, {"prompt": [USER], "chosen": long, "rejected": [BAD]}, family="qwen2.5")[0]
    tokenizer = family_tokenizer("qwen2.5")
    trained = [token for token, own in zip(example.chosen.ids, example.chosen.mask, strict=True) if own]
    assert tokenizer.decode(trained) == "hi<|im_end|>so it is<|im_end|>"
    observed = tokenizer.decode(
        [token for token, own in zip(example.chosen.ids, example.chosen.mask, strict=True) if not own]
    )
    assert "found" in observed
    assert observed.endswith("<|im_start|>assistant\n")
    whole = tokenizer.decode([*example.prompt, *example.chosen.ids])
    assert tokenizer.apply_chat_template([USER, *long], tokenize=False).startswith(whole)


def test_a_special_token_in_a_response_is_plain_text(tmp_path: Path) -> None:
    row = {"prompt": "Say hi.", "chosen": "hi<|im_end|>", "rejected": "no"}
    example = dataset(tmp_path, row)[0]
    stop = family_tokenizer("smollm2").convert_tokens_to_ids("<|im_end|>")
    assert example.chosen.ids.count(stop) == 1


def test_labelled_rows_and_pairs_both_make_labelled_responses(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Say hi.", "completion": "hi", "label": True},
        {"prompt": [USER], "completion": [BAD], "label": False},
        {"prompt": "Other.", "chosen": "hi", "rejected": "no"},
    ]
    data = dataset(tmp_path, *rows, labelled=True)
    assert [example.desirable for example in data] == [True, False, True, False]
    assert data.row_ids.tolist() == [0, 2, 4, 5]


def test_the_second_row_of_a_labelled_example_has_another_prompts_response(tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {word}.", "chosen": word, "rejected": f"not {word}"} for word in ("hi", "the", "tool")]
    data = dataset(tmp_path, *rows, labelled=True)
    batch = data.batch([0, 1, 2, 3])
    tokenizer = family_tokenizer("smollm2")
    mask = batch.tensors["loss_mask"].bool()
    responses = [tokenizer.decode(ids[own]) for ids, own in zip(batch.tensors["input_ids"], mask, strict=True)]
    assert [text.removesuffix("<|im_end|>") for text in responses] == [
        *("hi", "not tool"), *("not hi", "not tool"), *("the", "not hi"), *("not the", "not hi"),
    ]  # fmt: skip
    same = [rows[0]]
    with pytest.raises(DataError, match="all rows have one prompt"):
        dataset(tmp_path, *same, labelled=True).batch([0])


def test_a_batch_has_pairs_in_neighbouring_rows(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Say hi to the tool.", "chosen": "hi", "rejected": "no the word", "margin": 0.5},
        {"prompt": "Say hi.", "chosen": "the word", "rejected": "n"},
    ]
    data = dataset(tmp_path, *rows)
    batch = data.batch([1, 0])
    columns = batch.tensors
    assert columns["desirable"].tolist() == [True, False, True, False]
    assert columns["margin"].tolist() == [0.0, 0.0, 0.5, 0.5]
    assert batch.non_tensor_batch["index"].tolist() == [1, 1, 0, 0]
    for row, response in enumerate((data[1].chosen, data[1].rejected, data[0].chosen, data[0].rejected)):
        kept = columns["attention_mask"][row].bool()
        example = data[1] if row < 2 else data[0]
        assert columns["input_ids"][row][kept].tolist() == example.prompt + response.ids
        assert columns["position_ids"][row][kept].tolist() == list(range(int(kept.sum())))
        assert columns["input_ids"][row][columns["loss_mask"][row].bool()].tolist() == response.ids
    assert torch.equal(columns["attention_mask"] * columns["loss_mask"], columns["loss_mask"])


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({"prompt": "a", "answer": "b"}, "neither 'chosen' nor 'rejected', only prompt, answer;"),
    "labelled": ({"prompt": "a", "completion": "b", "label": True}, "completion and label are for dpo.loss_type=kto"),
    "no rejected": ({"prompt": "a", "chosen": "b"}, "there is no rejected; it must be text or a list of messages"),
    "empty chosen": ({"prompt": "a", "chosen": "", "rejected": "b"}, "chosen is ''; it must be text"),
    "a number": ({"prompt": 3, "chosen": "b", "rejected": "c"}, "prompt is 3; it must be text"),
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
    "no common prompt": ({"chosen": [GOOD], "rejected": [BAD]}, "there is no prompt, and chosen and rejected begin"),
    "mixed": ({"chosen": [USER, GOOD], "rejected": "no"}, "one of chosen and rejected is text and the other messages"),
    "ends with user": (
        {"prompt": "a", "chosen": [GOOD, USER], "rejected": [BAD]},
        "chosen is assistant, user after the prompt; it must begin and end with a message of assistant",
    ),
    "margin": (
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"},
        "margin is 'big'; it must be a number",
    ),
    "long": (
        {"prompt": "a" * 400, "chosen": "b", "rejected": "c"},
        "more than data.max_prompt_length=200; raise it to",
    ),
    "long response": (
        {"prompt": "a", "chosen": "b" * 300, "rejected": "c"},
        "chosen has 301 tokens, more than data.max_response_length=100; raise it to 301",
    ),
    "tools": ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": "{"}, "tools is not JSON"),
}


def test_all_bad_rows_are_named_at_once(tmp_path: Path) -> None:
    rows = [SHAPES["texts"], *(row for row, _ in BAD_ROWS.values())]
    with pytest.raises(DataError) as caught:
        dataset(tmp_path, *rows)
    text = str(caught.value)
    assert text.startswith(f"{len(BAD_ROWS)} rows cannot be used:")
    for number, (_, reason) in enumerate(BAD_ROWS.values(), start=1):
        assert f"rows.jsonl row {number}: " in text
        assert reason in text.splitlines()[number]
    assert text.endswith("Mend these rows, or set data.skip_bad_rows=True to leave them out.")
    assert len(dataset(tmp_path, *rows, skip_bad_rows=True)) == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": "b"}, "label is None; it must be true"),
        ({"prompt": "a", "completion": "b", "label": 0.5}, "label is 0.5; it must be true"),
        ({"prompt": "a", "label": True}, "there is no completion; it must be text"),
        ({"completion": "b", "label": True}, "there is no prompt; give one beside completion"),
    ],
)
def test_a_bad_labelled_row_is_named(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=f"row 0: {reason}"):
        dataset(tmp_path, row, labelled=True)


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 0: it is a chat, but the tokenizer has no chat template"):
        dataset(tmp_path, SHAPES["messages"], family=None)


def test_long_rows_are_left_out_or_cut_when_asked(tmp_path: Path) -> None:
    rows = [SHAPES["texts"], {"prompt": "a" * 400, "chosen": "b" * 300, "rejected": "c"}]
    assert len(dataset(tmp_path, *rows, filter_overlong_prompts=True)) == 1
    cut = dataset(tmp_path, *rows, truncation="left")[1]
    assert (len(cut.prompt), len(cut.chosen.ids), len(cut.chosen.mask), len(cut.rejected.ids)) == (200, 100, 100, 2)


def test_no_rows_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no row is left to train on"):
        dataset(tmp_path, {"prompt": "a"}, skip_bad_rows=True)


def test_the_fingerprint_follows_the_tokens(tmp_path: Path) -> None:
    first, again = (dataset(tmp_path, SHAPES["texts"]) for _ in range(2))
    assert first.fingerprint == again.fingerprint
    assert first.content_digest([0]) == again.content_digest([0])
    other = dataset(tmp_path, {**SHAPES["texts"], "rejected": "not"})
    assert other.fingerprint != first.fingerprint
    assert other.content_digest([0]) != first.content_digest([0])
    assert isinstance(first[0], Pair)
    assert isinstance(dataset(tmp_path, SHAPES["texts"], labelled=True)[0], Labelled)
