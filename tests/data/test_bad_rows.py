"""Bad rows are found before the first step, and a run goes on after they were left out or mended."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.data.build import PromptLoader
from dovetail.data.errors import DataError
from dovetail.data.files import read_rows
from dovetail.data.prompts import PromptDataset
from dovetail.data.sampler import PromptSampler
from tests.data.prompt_files import dataset

pytestmark = pytest.mark.unit


def _rows(count: int, **bad: Any) -> list[dict[str, Any]]:
    """Rows with numbers for prompts; `r3=None` puts another prompt in row 3."""
    prompts = [bad.get(f"r{row}", f"question {row}") for row in range(count)]
    return [{"prompt": text, "data_source": "toy", "reward_model": {"ground_truth": "1"}} for text in prompts]


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _loader(made: PromptDataset, **options: Any) -> PromptLoader:
    options = {"batch_size": 4, "seed": 3, "fingerprint": made.fingerprint, **options}
    sampler = PromptSampler(made.source_sizes, **options)
    sampler.follow(made.row_ids, made.files_digest)
    return PromptLoader(made, sampler)


def _take(loader: PromptLoader, batches: int) -> list[str]:
    taken = [loader.next_batch().non_tensor_batch["raw_prompt"] for _ in range(batches)]
    return [messages[0]["content"] if isinstance(messages, list) else messages for batch in taken for messages in batch]


def test_all_bad_rows_are_named_at_once_and_the_list_is_capped(tmp_path: Path) -> None:
    bad = {f"r{row}": None for row in range(5, 40)}
    file = _write(tmp_path / "rows.jsonl", _rows(50, **bad, r3="word " * 200))
    with pytest.raises(DataError, match=r"^36 rows cannot be used:") as caught:
        dataset(file)
    text = str(caught.value)
    assert "rows.jsonl row 3: the prompt has" in text
    assert "rows.jsonl row 5: the prompt is None; it must be text or a list of messages" in text
    assert "and 16 more" in text
    assert text.count("\n") == 22
    assert len(dataset(file, skip_bad_rows=True)) == 14


@pytest.mark.parametrize("num_workers", [1, 2])
def test_several_processes_find_what_one_finds(
    num_workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be used and what the filter leaves out, in one pass: each process imports transformers."""
    file = _write(tmp_path / "rows.jsonl", _rows(3000, r7=None, r1500="word " * 200, r2999=[{"role": 1}], r11="\ud800"))
    with caplog.at_level(logging.INFO), pytest.raises(DataError) as caught:
        dataset(file, filter_overlong_prompts=True, filter_overlong_prompts_workers=num_workers)
    named = [line.split(":")[0].rpartition(" ")[2] for line in str(caught.value).splitlines()[1:-1]]
    assert named == ["7", "11", "2999"]
    assert "rows.jsonl: 1 of 3000 prompts are longer" in caplog.text


def test_a_short_text_is_not_measured_and_a_text_of_many_tokens_a_letter_is(tmp_path: Path) -> None:
    """The shortcut by letters holds for ASCII alone: other letters are several tokens each."""
    file = _write(tmp_path / "rows.jsonl", _rows(4, r1="\u4f60" * 40))
    with pytest.raises(DataError, match=r"^1 row cannot be used:\n.* row 1: the prompt has"):
        dataset(file, max_prompt_length=64)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("options", [{"skip_bad_rows": True}, {"filter_overlong_prompts": True}])
def test_a_run_goes_on_after_the_advised_filter_left_rows_out(
    shuffle: bool, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = _write(tmp_path / "rows.jsonl", _rows(40, r9="word " * 200, r21="word " * 150))
    before = _loader(dataset(file, truncation="left", shuffle=shuffle), shuffle=shuffle)
    read = _take(before, 4)
    state = json.loads(json.dumps(before.state_dict()))
    rest = [text for text in _take(before, 6) if "word" not in text]
    after = _loader(dataset(file, shuffle=shuffle, **options), shuffle=shuffle)
    with caplog.at_level(logging.WARNING):
        after.load_state_dict(state)
    assert caplog.text.count("going on at epoch 0") == 1
    assert _take(after, len(rest) // 4) == rest[: len(rest) // 4 * 4]
    assert not set(read) & set(rest)


def test_a_run_goes_on_when_only_rows_it_has_not_read_have_changed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    before = _loader(dataset(_write(path, _rows(40))))
    read = _take(before, 3)
    state = before.state_dict()
    rest = _take(before, 7)
    unread = int(rest[10].split()[1])
    after = _loader(dataset(_write(path, _rows(40, **{f"r{unread}": "mended"}))))
    after.load_state_dict(state)
    assert _take(after, 7) == [*rest[:10], "mended", *rest[11:]]
    changed = int(read[5].split()[1])
    other = _loader(dataset(_write(path, _rows(40, **{f"r{changed}": "mended"}))))
    with pytest.raises(DataError, match=r"cannot be continued.*rows not read yet may change in place"):
        other.load_state_dict(state)


def test_the_state_of_a_loader_sorts_no_epoch_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for after every step, and an epoch may have millions of rows."""
    loader = _loader(dataset(_write(tmp_path / "rows.jsonl", _rows(16))))
    plain, epochs = PromptSampler.epoch_order, list[int]()

    def noted(self: PromptSampler, epoch: int) -> Any:
        epochs.append(epoch)
        return plain(self, epoch)

    monkeypatch.setattr(PromptSampler, "epoch_order", noted)
    for _ in range(6):
        loader.next_batch()
        loader.state_dict()
    assert epochs == [0, 1]


def test_the_digest_of_what_was_read_does_not_depend_on_when_it_was_asked_for(tmp_path: Path) -> None:
    made = dataset(_write(tmp_path / "rows.jsonl", _rows(40)))
    often, once = _loader(made), _loader(made)
    for _ in range(13):
        often.next_batch()
        often.state_dict()
    _take(once, 13)
    assert often.state_dict() == once.state_dict()
    assert often.state_dict()["epoch"] == 1


def test_the_order_of_whole_data_is_the_one_it_always_was(tmp_path: Path) -> None:
    made = dataset(_write(tmp_path / "rows.jsonl", _rows(40)))
    plain = PromptSampler(made.source_sizes, batch_size=4, seed=3)
    assert np.array_equal(_loader(made).sampler.epoch_order(2), plain.epoch_order(2))


def test_columns_with_names_of_the_batch_are_found_in_extra_info(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{**row, "uid": 5, "responses": "r", "index": 9, "mine": "m"} for row in _rows(2)]
    rows[1]["extra_info"] = {"uid": "the row's own"}
    made = dataset(_write(tmp_path / "rows.jsonl", rows))
    assert "the columns uid, responses, index have names of the batch's own" in caplog.text
    assert "uid" not in made[0]
    assert (made[0]["index"], made[0]["mine"]) == (0, "m")
    expected = {"prompt": rows[0]["prompt"], "uid": 5, "responses": "r", "index": 9, "mine": "m"}
    assert made[0]["extra_info"] == expected
    assert made[1]["extra_info"]["uid"] == "the row's own"


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b'{"a": 1}\n{"a": ', b"[1, 2]", b'{"a": 1}\n3', b"[" * 100_000])
def test_a_broken_jsonl_file_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.jsonl"):
        read_rows(str(file))
