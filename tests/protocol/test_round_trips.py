"""Property tests: operations that undo each other give back the same batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol import PADDING_COLUMN, DataProto, pad_dataproto_to_divisor, unpad_dataproto
from tests.protocol.batches import assert_same, batches, make_batch

pytestmark = pytest.mark.unit

quick = settings(max_examples=40, deadline=None)
sizes = st.integers(1, 9)


@quick
@given(batches(), sizes)
def test_concat_of_padded_chunks_is_the_batch(batch: DataProto, chunks: int) -> None:
    parts = batch.chunk(chunks, auto_padding=True)
    assert len(parts) == chunks
    assert len({len(part) for part in parts}) == 1
    assert_same(DataProto.concat(parts), batch)


@quick
@given(batches(), sizes)
def test_concat_of_splits_is_the_batch(batch: DataProto, size: int) -> None:
    parts = batch.split(size)
    assert all(len(part) == size for part in parts[:-1])
    if len(batch):
        assert_same(DataProto.concat(parts), batch)
    else:
        assert parts == []


@quick
@given(batches(min_rows=1), sizes)
def test_padding_rows_follow_every_row_operation(batch: DataProto, chunks: int) -> None:
    parts = [part.repeat(2) for part in batch.chunk(chunks, auto_padding=True)]
    assert_same(DataProto.concat(parts), batch.repeat(2))


@quick
@given(batches(), sizes)
def test_unpad_undoes_pad(batch: DataProto, divisor: int) -> None:
    padded, pad_size = pad_dataproto_to_divisor(batch, divisor)
    assert len(padded) % divisor == 0
    assert 0 <= pad_size < divisor
    assert PADDING_COLUMN not in padded
    assert_same(unpad_dataproto(padded, pad_size), batch)


@quick
@given(batches(), st.integers(0, 4))
def test_interleaved_repeat_keeps_copies_together(batch: DataProto, times: int) -> None:
    expected = [row for row in range(len(batch)) for _ in range(times)]
    assert_same(batch.repeat(times, interleave=True), batch.select_idxs(expected))


@quick
@given(batches(), st.integers(0, 4))
def test_plain_repeat_stacks_whole_batches(batch: DataProto, times: int) -> None:
    repeated = batch.repeat(times, interleave=False)
    assert_same(repeated, DataProto.concat([batch] * times) if times else batch[:0])


@quick
@given(batches(), st.randoms(use_true_random=False))
def test_reorder_is_undone_by_the_inverse_permutation(batch: DataProto, random: object) -> None:
    order = list(range(len(batch)))
    random.shuffle(order)  # pyrefly: ignore [missing-attribute]
    before = batch.select(deepcopy=True)
    batch.reorder(torch.tensor(order, dtype=torch.int64))
    assert_same(batch, before.select_idxs(order))
    batch.reorder(np.argsort(np.array(order, dtype=np.int64)))
    assert_same(batch, before)


@quick
@given(batches(min_rows=1), sizes, st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_iterator_gives_every_row_once_per_epoch_and_repeats_itself(
    batch: DataProto, size: int, epochs: int, shuffle: bool, seed: int
) -> None:
    batch.non_tensor_batch["number_of_row"] = np.arange(len(batch))
    options = {"shuffle": shuffle, "drop_last": False}
    runs = [list(batch.make_iterator(size, epochs, seed, options)) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert_same(first, second)
    per_epoch = -(-len(batch) // size)
    assert len(runs[0]) == per_epoch * epochs
    for epoch in range(epochs):
        parts = runs[0][epoch * per_epoch : (epoch + 1) * per_epoch]
        joined = DataProto.concat(parts)
        joined.reorder(np.argsort(joined.non_tensor_batch["number_of_row"]))
        assert_same(joined, batch)


def test_iterator_shuffles_anew_each_epoch_and_leaves_the_global_generator_alone() -> None:
    batch = make_batch(64)
    state = torch.get_rng_state()
    first, second = batch.make_iterator(64, epochs=2, seed=1, dataloader_kwargs={"shuffle": True})
    assert torch.equal(state, torch.get_rng_state())
    assert first.batch["row"].tolist() != second.batch["row"].tolist()
    (other,) = batch.make_iterator(64, epochs=1, seed=2, dataloader_kwargs={"shuffle": True})
    assert first.batch["row"].tolist() != other.batch["row"].tolist()


def test_iterator_that_drops_the_rest_gives_whole_mini_batches_only() -> None:
    parts = list(make_batch(10).make_iterator(4, epochs=1, dataloader_kwargs={"drop_last": True}))
    assert [len(part) for part in parts] == [4, 4]


def test_iterator_refuses_a_rest_that_nobody_decided_about() -> None:
    with pytest.raises(ValueError, match=r"10 rows do not divide into mini-batches of 4.*drop_last"):
        make_batch(10).make_iterator(4, epochs=1)
    with pytest.raises(ValueError, match=r"num_workers.*known are 'shuffle' and 'drop_last'"):
        make_batch(8).make_iterator(4, epochs=1, dataloader_kwargs={"num_workers": 2})


def test_chunk_refuses_uneven_parts_unless_padding_is_allowed() -> None:
    batch = make_batch(5)
    with pytest.raises(ValueError, match=r"5 rows do not divide into 2 equal chunks.*auto_padding=True"):
        batch.chunk(2)
    batch.meta_info["auto_padding"] = True
    first, second = batch.chunk(2)
    assert first.non_tensor_batch[PADDING_COLUMN].tolist() == [False, False, False]
    assert second.non_tensor_batch[PADDING_COLUMN].tolist() == [False, False, True]
    assert second.batch["row"].tolist() == [3, 4, 0]
    with pytest.raises(ValueError, match="do not divide"):
        batch.chunk(2, auto_padding=False)


def test_padding_can_be_longer_than_the_batch() -> None:
    padded, pad_size = pad_dataproto_to_divisor(make_batch(3), 8)
    assert pad_size == 5
    assert padded.batch["row"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
