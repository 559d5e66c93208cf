"""The order is a function of seed and epoch; the position survives anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.config import DovetailConfig
from dovetail.data import build
from dovetail.data.build import PromptLoader, build_train_loader, build_val_loader
from dovetail.data.errors import DataError
from dovetail.data.sampler import PromptSampler, shuffled
from dovetail.observability import waits
from tests.data.prompt_files import dataset, toy_file
from tests.models.tiny import tiny_tokenizer
from tests.waiting import wait_until

pytestmark = pytest.mark.unit


def take(sampler: PromptSampler, count: int) -> list[list[int]]:
    return [sampler.next_batch().tolist() for _ in range(count)]


def test_the_shuffle_is_a_permutation_that_no_upgrade_may_change() -> None:
    assert shuffled(8, 42, 0).tolist() == [3, 1, 4, 5, 7, 6, 2, 0]
    assert sorted(shuffled(1000, 1, 2).tolist()) == list(range(1000))


def test_the_shuffle_is_even() -> None:
    """Every row is equally likely at the first place: chi-squared over 4000 seeds stays below its 99.9% point."""
    first = np.array([shuffled(10, seed, 0)[0] for seed in range(4000)])
    counts = np.bincount(first, minlength=10)
    assert ((counts - 400) ** 2 / 400).sum() < 27.9


def test_each_epoch_has_every_row_once_in_a_new_order() -> None:
    sampler = PromptSampler([12], batch_size=4, seed=3)
    epochs = [[row for batch in sampler for row in batch.tolist()] for _ in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert sampler.epoch == 3


def test_a_short_last_batch_is_dropped_or_kept() -> None:
    assert [len(batch) for batch in PromptSampler([10], batch_size=4)] == [4, 4]
    keeping = PromptSampler([10], batch_size=4, drop_last=False, shuffle=False)
    assert len(keeping) == 3
    assert [batch.tolist() for batch in keeping] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@settings(max_examples=50, deadline=None)
@given(size=st.integers(4, 40), batch=st.integers(1, 4), done=st.integers(0, 30), keep=st.booleans())
def test_a_restored_sampler_continues_exactly(size: int, batch: int, done: int, keep: bool) -> None:
    options: dict[str, Any] = {"batch_size": batch, "seed": 5, "drop_last": not keep, "fingerprint": "f"}
    sampler, restored = PromptSampler([size], **options), PromptSampler([size], **options)
    take(sampler, done)
    restored.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert take(restored, 10) == take(sampler, 10)


def test_another_batch_size_continues_at_the_same_row() -> None:
    sampler, wider = PromptSampler([20], batch_size=2, seed=1), PromptSampler([20], batch_size=5, seed=1)
    order = sampler.epoch_order(0).tolist()
    take(sampler, 3)
    wider.load_state_dict(sampler.state_dict())
    assert take(wider, 1) == [order[6:11]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fingerprint": "g"}, "fingerprint 'f' and this run has 'g'.*give another folder .*resume_mode=disable"),
        ({"seed": 2}, "data seed 1 and this run has 2"),
        ({"shuffle": False}, "data.shuffle True"),
        ({"source_sizes": [9]}, "rows per file and epoch"),
    ],
)
def test_a_state_of_other_data_is_an_error(change: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {"source_sizes": [8], "batch_size": 2, "seed": 1, "fingerprint": "f"}
    state = PromptSampler(**options).state_dict()
    with pytest.raises(DataError, match=words):
        PromptSampler(**{**options, **change}).load_state_dict(state)


def test_weights_set_the_share_of_each_file() -> None:
    sampler = PromptSampler([30, 10], batch_size=40, weights=[1, 3])
    counts = [(batch < 30).sum() for batch in (sampler.next_batch() for _ in range(3))]
    assert counts == [10, 10, 10]


def test_a_file_with_a_small_share_is_used_up_before_it_repeats() -> None:
    sampler = PromptSampler([30, 10], batch_size=40, weights=[1, 3], seed=9)
    seen = [row for _ in range(3) for row in sampler.next_batch().tolist() if row < 30]
    assert sorted(seen) == list(range(30))
    repeated = PromptSampler([30, 10], batch_size=40, weights=[1, 3]).next_batch()
    assert np.bincount(repeated[repeated >= 30] - 30).tolist() == [3] * 10


def test_weights_without_shuffling_spread_files_evenly() -> None:
    order = PromptSampler([4, 4], batch_size=8, weights=[1, 1], shuffle=False).next_batch()
    assert order.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_wrong_weights_and_too_little_data_are_errors() -> None:
    with pytest.raises(DataError, match="does not fit 2 files"):
        PromptSampler([4, 4], batch_size=2, weights=[1])
    with pytest.raises(DataError, match="there are 3 prompts, fewer than one batch of 4"):
        PromptSampler([3], batch_size=4)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_the_loaders_state_is_that_of_the_last_batch_given_out(tmp_path: Path, num_workers: int) -> None:
    prompts = dataset(toy_file(tmp_path, 10))

    def loader() -> PromptLoader:
        sampler = PromptSampler([10], batch_size=3, seed=4, fingerprint=prompts.fingerprint)
        return PromptLoader(prompts, sampler, num_workers=num_workers)

    def rows(source: PromptLoader, count: int) -> list[list[int]]:
        return [source.next_batch().non_tensor_batch["index"].tolist() for _ in range(count)]

    whole, first, second = loader(), loader(), loader()
    expected = rows(whole, 8)
    assert rows(first, 4) == expected[:4]
    assert first.epoch == 1
    second.load_state_dict(first.state_dict())
    assert rows(second, 4) == expected[4:]
    for each in (whole, first, second):
        each.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_who_waits_for_a_row_that_does_not_come_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    monkeypatch.setattr(build, "_SLOW_S", 0.0)
    monkeypatch.setattr(waits, "_REGISTER", waits._Register())
    prompts, named = dataset(toy_file(tmp_path, 4)), []
    read = type(prompts).__getitem__

    def slow(self: Any, index: int) -> Any:
        if not named:  # it stays here until somebody has looked
            named.extend(map(str, wait_until(waits._REGISTER.look, "the name of the wait")))
        return read(self, index)

    monkeypatch.setattr(type(prompts), "__getitem__", slow)
    loader = PromptLoader(prompts, PromptSampler([4], batch_size=2), num_workers=num_workers)
    loader.next_batch()
    loader.close()
    assert named[0].startswith("the driver waits for a batch of the data loader since")


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_iterating_finishes_the_epoch_that_was_begun(tmp_path: Path, num_workers: int) -> None:
    prompts = dataset(toy_file(tmp_path, 10))
    loader = PromptLoader(prompts, PromptSampler([10], batch_size=3, seed=4), num_workers=num_workers)
    loader.next_batch()
    assert [len(list(loader)) for _ in range(3)] == [2, 3, 3]
    assert loader.epoch == 3
    assert loader.state_dict()["position"] == 0
    loader.close()


def test_loaders_are_built_from_the_configuration(tmp_path: Path) -> None:
    config = DovetailConfig(
        data={
            "train_files": toy_file(tmp_path, 9),
            "val_files": [toy_file(tmp_path, 5, "val.parquet")],
            "train_batch_size": 4,
            "max_prompt_length": 64,
            "seed": 7,
        }
    )
    train, val = build_train_loader(config, tiny_tokenizer()), build_val_loader(config, tiny_tokenizer())
    assert val is not None
    assert (len(train), len(val)) == (2, 1)
    assert val.next_batch().non_tensor_batch["index"].tolist() == [0, 1, 2, 3, 4]
    assert build_val_loader(DovetailConfig(), tiny_tokenizer()) is None


def test_a_users_dataset_and_sampler_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "from dovetail.data.prompts import PromptDataset\n"
        "from dovetail.data.sampler import PromptSampler\n"
        "class Loud(PromptDataset):\n"
        "    def __getitem__(self, index):\n"
        "        return {**super().__getitem__(index), 'loud': True}\n"
        "class Backwards(PromptSampler):\n"
        "    def epoch_order(self, epoch):\n"
        "        return np.arange(self.num_rows)[::-1]\n"
    )
    settings = {
        "train_files": toy_file(tmp_path, 6),
        "train_batch_size": 3,
        "max_prompt_length": 64,
        "custom_cls": {"path": str(file), "name": "Loud"},
        "sampler": {"class_path": str(file), "class_name": "Backwards"},
    }
    batch = build_train_loader(DovetailConfig(data=settings), tiny_tokenizer()).next_batch()
    assert batch.non_tensor_batch["index"].tolist() == [5, 4, 3]
    assert batch.non_tensor_batch["loud"].tolist() == [True] * 3
    settings["sampler"] = {"class_path": str(file), "class_name": "Loud"}
    with pytest.raises(DataError, match="is no sampler; inherit from"):
        build_train_loader(DovetailConfig(data=settings), tiny_tokenizer())
