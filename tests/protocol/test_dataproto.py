"""`DataProto`: making, picking rows and columns, joining batches, and the messages of what it refuses."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dovetail.protocol import DataProto, DataProtoItem
from tests.protocol.batches import assert_same, make_batch

pytestmark = pytest.mark.unit


def test_from_single_dict_sorts_columns_by_type() -> None:
    batch = DataProto.from_single_dict({"a": torch.zeros(2, 1), "b": np.arange(2), "c": [[1], [2, 3]]}, {"k": 1})
    assert list(batch.tensors) == ["a"]
    assert batch.non_tensor_batch["c"].tolist() == [[1], [2, 3]]
    assert batch.meta_info == {"k": 1}


def test_a_list_of_equal_lists_stays_one_object_per_row() -> None:
    batch = DataProto.from_dict(non_tensors={"ids": [[1, 2], [3, 4]]})
    assert batch.non_tensor_batch["ids"].shape == (2,)
    assert batch[0].non_tensor_batch["ids"] == [1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)}), r"different numbers of rows.*'b': 3"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"u": ["x"]}), r"different numbers of rows.*'u': 1"),
        (lambda: DataProto.from_dict({"a": torch.tensor(1.0)}), r"'a'\] is a scalar"),
        (lambda: DataProto.from_dict({"a": [1, 2]}), r"'a'\] is a list"),  # pyrefly: ignore [bad-argument-type]
        (lambda: DataProto.from_single_dict({"a": 3}), r"'a' is a int; use a tensor"),
        (lambda: DataProto.from_dict({"a": torch.zeros(1)}, {"a": ["x"]}), r"\['a'\] are both tensors and numpy"),
        (
            lambda: DataProto(TensorDict({"a": torch.zeros(2, 3)}, [2, 3])),
            r"batch_size \(2, 3\); it must have one",
        ),
        (lambda: DataProto(non_tensor_batch={"u": ["x"]}), r"'u'\] is a list; use a numpy array"),
        (
            lambda: DataProto(TensorDict({"a": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)}, [1])),
            r"'a'\] is a nested tensor; pad it",
        ),
    ],
)
def test_malformed_batches_are_refused_with_the_column_named(make: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()  # pyrefly: ignore [not-callable]


def test_an_int_gives_an_item_and_iteration_ends() -> None:
    batch = make_batch(3)
    item = batch[-1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["row"].item() == 2
    assert item.non_tensor_batch["uid"] == "prompt-2"
    assert len(list(batch)) == 3
    with pytest.raises(IndexError, match="row 3 is out of range for a batch of 3 rows"):
        batch[3]


@pytest.mark.parametrize(
    "index",
    [[3, 0, 0], np.array([3, 0, 0]), torch.tensor([3, 0, 0]), torch.tensor([-1, 0, -4], dtype=torch.int32)],
)
def test_rows_can_be_picked_by_any_index(index: object) -> None:
    assert make_batch(4)[index].batch["row"].tolist() == [3, 0, 0]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_rows_can_be_picked_by_a_mask(kind: object) -> None:
    mask = kind([True, False, False, True])  # pyrefly: ignore [not-callable]
    picked = make_batch(4)[mask]
    assert picked.batch["row"].tolist() == [0, 3]
    assert picked.non_tensor_batch["uid"].tolist() == ["prompt-0", "prompt-3"]


def test_bad_indices_are_refused() -> None:
    batch = make_batch(4)
    with pytest.raises(IndexError, match="mask has 3 entries for 4 rows"):
        batch[[True, False, True]]
    with pytest.raises(IndexError, match="row 4 is out of range"):
        batch[[0, 4]]
    with pytest.raises(IndexError, match=r"integers or a bool mask, got dtype torch\.float32"):
        batch[torch.tensor([0.0])]
    with pytest.raises(TypeError, match="not by str"):
        batch["row"]


def test_slices_share_memory_and_picked_rows_do_not() -> None:
    batch = make_batch(4)
    batch[1:3].batch["float32"].zero_()
    assert batch.batch["float32"][1:3].abs().sum() == 0
    batch[[0]].batch["float32"].fill_(7.0)
    assert (batch.batch["float32"][0] != 7.0).any()
    assert batch.slice(0, 4, 2).batch["row"].tolist() == [0, 2]


def test_derived_batches_do_not_share_the_meta_info_dict() -> None:
    batch = make_batch(4)
    for derived in (batch[:2], batch.select(), batch.chunk(2)[0], batch.repeat(2), batch[[0]], copy.copy(batch)):
        derived.meta_info["temperature"] = 0.0
    assert batch.meta_info == {"temperature": 0.7}


def test_select_keeps_named_columns_and_suggests_the_nearest_name() -> None:
    batch = make_batch(2)
    kept = batch.select(["row"], ["uid"], [])
    assert list(kept.columns) == ["row", "uid"]
    assert kept.meta_info == {}
    assert kept.batch["row"].data_ptr() == batch.batch["row"].data_ptr()
    with pytest.raises(KeyError, match=r"batch has no 'rwo'\. Did you mean row\?"):
        batch.select(["rwo"])


def test_deepcopied_selection_shares_nothing() -> None:
    batch = make_batch(2)
    copied = batch.select(deepcopy=True)
    copied.batch["float32"].zero_()
    copied.non_tensor_batch["nested"][0]["ids"].append(9)
    assert_same(batch, make_batch(2))


def test_pop_takes_columns_out_or_changes_nothing() -> None:
    batch = make_batch(3)
    with pytest.raises(KeyError, match="non_tensor_batch has no 'missing'"):
        batch.pop(["row"], ["missing"])
    assert_same(batch, make_batch(3))
    taken = batch.pop(["row"], ["uid"], ["temperature"])
    assert list(taken.columns) == ["row", "uid"]
    assert taken.meta_info == {"temperature": 0.7}
    assert "row" not in batch
    assert "uid" not in batch
    assert batch.meta_info == {}
    assert_same(batch.union(taken).select(["row"]), make_batch(3).select(["row"]))


def test_popping_the_last_tensor_keeps_the_numpy_rows() -> None:
    batch = DataProto.from_dict({"a": torch.zeros(2)}, {"u": ["x", "y"]})
    batch.pop(["a"])
    assert batch.batch is None
    assert len(batch) == 2


def test_rename_works_on_both_kinds_and_refuses_collisions() -> None:
    batch = make_batch(2)
    batch.rename(["row", "uid"], ["index", "group"])
    assert batch.batch["index"].tolist() == [0, 1]
    assert batch.non_tensor_batch["group"].tolist() == ["prompt-0", "prompt-1"]
    with pytest.raises(ValueError, match=r"several columns the name \['group'\]"):
        batch.rename("index", "group")
    with pytest.raises(KeyError, match=r"no 'indx'\. Did you mean index\?"):
        batch.rename("indx", "x")


def test_union_adds_columns_and_accepts_equal_ones_with_nan() -> None:
    nan = torch.tensor([[float("nan"), 1.0]])
    left = DataProto.from_dict({"a": nan, "b": torch.ones(1)}, {"o": [{"x": float("nan")}]})
    right = DataProto.from_dict({"a": nan.clone(), "c": torch.zeros(1)}, {"o": [{"x": float("nan")}]}, {"k": 1})
    united = left.union(right)
    assert united is left
    assert set(united.columns) == {"a", "b", "c", "o"}
    assert united.meta_info == {"k": 1}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": torch.tensor([0.0, 5.0, 6.0])}, r"'x' clashes: row 1 is tensor\(1.\) against tensor\(5.\)"),
        ({"x": torch.tensor([0, 1, 2])}, r"'x' clashes: float32\[3\] against int64\[3\]"),
        ({"x": torch.zeros(3, 1)}, r"'x' clashes: float32\[3\] against float32\[3, 1\]"),
        ({"x": torch.tensor([0.0, 1.0, float("nan")])}, r"'x' clashes: row 2 is tensor\(2.\) against tensor\(nan\)"),
        ({"x": np.arange(3.0)}, r"'x' clashes: float32\[3\] against float64\[3\]"),
        ({"o": ["a", ["b"], "c"]}, r"'o' clashes: row 1 is \['b', 1\] against \['b'\]"),
        ({"n": np.array([0.0, np.nan, 3.0])}, r"'n' clashes: row 2 is .*2.0.* against .*3.0"),
        ({"new": torch.zeros(2)}, r"union of 3 rows with 2 rows"),
    ],
)
def test_union_refuses_clashes_and_names_column_and_row(other: dict, message: str) -> None:
    def make() -> DataProto:
        return DataProto.from_single_dict(
            {"x": torch.arange(3.0), "o": ["a", ["b", 1], "c"], "n": np.array([0.0, np.nan, 2.0])}
        )

    batch = make()
    with pytest.raises(ValueError, match=message):
        batch.union(DataProto.from_single_dict({"extra": torch.zeros(len(next(iter(other.values())))), **other}))
    assert_same(batch, make())


def test_union_of_meta_info_refuses_clashes_and_unites_metrics() -> None:
    left = DataProto(meta_info={"metrics": {"a": 1}, "timing": {"gen": 1.0}, "t": 1.0})
    left.union(DataProto(meta_info={"metrics": {"b": 2}, "timing": {"old": 2.0}, "t": 1.0}))
    assert left.meta_info == {"metrics": {"a": 1, "b": 2}, "timing": {"gen": 1.0, "old": 2.0}, "t": 1.0}
    with pytest.raises(ValueError, match=r"meta_info\['t'\] is 1.0 here and 2.0 in the other"):
        left.union(DataProto(meta_info={"t": 2.0}))
    with pytest.raises(ValueError, match=r"meta_info\['metrics'\]\['a'\] is 1 here and 5"):
        left.union(DataProto(meta_info={"metrics": {"a": 5}}))


def test_concat_merges_metrics_the_same_in_any_grouping() -> None:
    parts = [DataProto(meta_info={"metrics": m}) for m in ({"l": 1.0}, [{"l": 2.0}, {"l": 3.0, "k": 0}], {"l": [4.0]})]
    flat = DataProto.concat(parts).meta_info
    nested = DataProto.concat([DataProto.concat(parts[:2]), parts[2]]).meta_info
    assert flat == nested == {"metrics": {"l": [1.0, 2.0, 3.0, 4.0], "k": [0]}}


def test_concat_keeps_the_slowest_timing_and_refuses_other_clashes() -> None:
    parts = [DataProto(meta_info={"timing": {"gen": seconds}, "t": 1}) for seconds in (1.0, 3.0, 2.0)]
    assert DataProto.concat(parts).meta_info == {"timing": {"gen": 3.0}, "t": 1}
    parts[2].meta_info["t"] = 2
    with pytest.raises(ValueError, match=r"meta_info\['t'\] is 1 in an earlier batch and 2 in batch 2"):
        DataProto.concat(parts)
    with pytest.raises(TypeError, match="holds a float; it must be a dict"):
        DataProto.concat([DataProto(meta_info={"metrics": 0.5})])


def test_concat_of_nothing_and_of_zero_rows() -> None:
    assert DataProto.concat([]).is_empty()
    batch = make_batch(3)
    assert_same(DataProto.concat([batch[:0], batch, batch[3:]]), batch)
    assert_same(DataProto.concat([DataProto(), batch]), batch)
    empty = batch[:0]
    assert len(empty) == 0
    assert empty.is_empty()
    assert empty.batch["float32"].shape == (0, 3)
    assert [len(part) for part in empty.chunk(4)] == [0, 0, 0, 0]
    assert list(empty.make_iterator(4, epochs=2)) == []


def test_concat_refuses_different_columns_dtypes_and_shapes() -> None:
    def one(**columns: object) -> DataProto:
        return DataProto.from_single_dict(columns)

    with pytest.raises(ValueError, match=r"batch 1 and the first differ in columns \['b'\]"):
        DataProto.concat([one(a=torch.zeros(1)), one(a=torch.zeros(1), b=torch.zeros(1))])
    with pytest.raises(ValueError, match=r"'a' has rows of torch.float32\[2\] and torch.float32\[3\]"):
        DataProto.concat([one(a=torch.zeros(1, 2)), one(a=torch.zeros(1, 3))])
    with pytest.raises(ValueError, match=r"'a' has rows of torch.float32\[\] and torch.int64\[\]"):
        DataProto.concat([one(a=torch.zeros(1)), one(a=torch.zeros(1, dtype=torch.int64))])


def test_concat_never_turns_numbers_into_strings() -> None:
    parts = [DataProto.from_dict(non_tensors={"a": np.array([value])}) for value in ("x", 1)]
    assert DataProto.concat(parts).non_tensor_batch["a"].tolist() == ["x", 1]


def test_reorder_refuses_what_is_no_permutation() -> None:
    with pytest.raises(ValueError, match="permutation of 3 rows, got 3 indices with 2 different ones"):
        make_batch(3).reorder([0, 0, 1])


def test_difference_names_the_first_thing_that_differs() -> None:
    left, right = make_batch(3), make_batch(3)
    assert left.equals(right)
    right.non_tensor_batch["nested"][1]["ids"] = [5]
    assert "column 'nested': row 1" in str(left.difference(right))
    assert "keys" in str(left.difference(left.select(["row"])))
    assert "meta_info['temperature']" in str(
        left.difference(DataProto(left.batch, left.non_tensor_batch, {"temperature": 1}))
    )


def test_to_moves_tensors_and_returns_the_batch() -> None:
    batch = make_batch(2).select(["row"])
    assert batch.to("meta") is batch
    assert batch.batch["row"].device.type == "meta"
    assert DataProto().to("cpu").batch is None
