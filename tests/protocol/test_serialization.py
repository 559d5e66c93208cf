"""Batches through pickle: to the bit, without copies, safe against writes into shared memory, whatever they hold."""

from __future__ import annotations

import copy
import pickle
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.protocol import DataProto, ReadOnlyTensor, is_readonly
from dovetail.protocol.plain_file import PlainFileError, save_plain
from tests.protocol.batches import assert_same, make_batch

pytestmark = pytest.mark.unit


def through_shared_memory(batch: DataProto) -> tuple[DataProto, list[Any]]:
    """What Ray does: buffers out of band, given back as read-only memory."""
    buffers: list[Any] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    views = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    return pickle.loads(data, buffers=views), views


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_pickle_keeps_every_column(rows: int, protocol: int) -> None:
    batch = make_batch(rows)
    copied = pickle.loads(pickle.dumps(batch, protocol=protocol))
    assert_same(copied, batch)
    assert not any(is_readonly(tensor) for tensor in copied.tensors.values())
    copied.batch["float32"].add_(1)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_shared_memory_keeps_every_column_without_a_warning(rows: int) -> None:
    batch = make_batch(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        received, _ = through_shared_memory(batch)
    assert_same(received, batch)
    received.check_consistency()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
def test_tensors_arrive_to_the_bit(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (64, 8), dtype=torch.uint8)
    column = raw.view(dtype)
    received, _ = through_shared_memory(DataProto.from_dict({"x": column}))
    assert received.batch["x"].dtype == dtype
    assert bits(received.batch["x"].as_subclass(torch.Tensor)) == bits(column)


def test_nan_payloads_and_negative_zero_survive() -> None:
    column = torch.tensor([0x7FC00001, 0x80000000 - 2**32, 0x7F800000], dtype=torch.int32).view(torch.float32)
    received, _ = through_shared_memory(DataProto.from_dict({"x": column}))
    assert bits(received.batch["x"].clone()) == bits(column)


def test_received_tensors_lie_in_the_buffers_they_came_in() -> None:
    received, views = through_shared_memory(make_batch(16).select(["float32", "bfloat16"], []))
    starts = {np.frombuffer(view, dtype=np.uint8).ctypes.data for view in views}
    assert {tensor.data_ptr() for tensor in received.tensors.values()} == starts


def test_a_slice_sends_only_its_own_rows() -> None:
    batch = DataProto.from_dict({"x": torch.randn(1000, 100)})
    assert len(pickle.dumps(batch[:1])) < 3000


def test_autograd_history_is_left_behind() -> None:
    batch = DataProto.from_dict({"x": torch.ones(2, requires_grad=True) * 2})
    assert not pickle.loads(pickle.dumps(batch)).batch["x"].requires_grad


def test_tensors_inside_object_columns_arrive_and_shared_ones_are_sent_once() -> None:
    image = torch.randn(3, 64, 64).to(torch.bfloat16)
    batch = DataProto.from_dict(
        non_tensors={"multi_modal_inputs": [{"pixels": image, "grid": (image[0], [1])}]}
    ).repeat(8)
    data = pickle.dumps(batch)
    assert len(data) < 2 * image.nbytes
    received, _ = through_shared_memory(batch)
    assert_same(received, batch)
    first, last = received[0].non_tensor_batch["multi_modal_inputs"], received[7].non_tensor_batch["multi_modal_inputs"]
    assert first["pixels"] is last["pixels"]
    assert isinstance(first["pixels"], ReadOnlyTensor)
    assert isinstance(batch[0].non_tensor_batch["multi_modal_inputs"]["pixels"], torch.Tensor)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "method": lambda t: t.add_(1),
    "augmented": lambda t: t.__iadd__(1),
    "item": lambda t: t.__setitem__(0, 1),
    "mask": lambda t: t.__setitem__(t > 0, 0),
    "out": lambda t: torch.mul(t, 2, out=t),
    "row view": lambda t: t[0].zero_(),
    "reshaped": lambda t: t.view(-1).zero_(),
    "transposed": lambda t: t.T.neg_(),
    "data": lambda t: t.data.fill_(1),
    "detached": lambda t: t.detach().fill_(1),
    "unbound": lambda t: t.unbind()[0].fill_(1),
    "iterated": lambda t: next(iter(t)).fill_(1),
    "same dtype": lambda t: t.float().fill_(1),
    "contiguous": lambda t: t.contiguous().fill_(1),
    "numpy": lambda t: t.numpy().__setitem__(0, 1),
    "numpy array": lambda t: np.asarray(t).__setitem__(0, 1),
    "inplace argument": lambda t: torch.nn.functional.relu(t, inplace=True),
    "foreach": lambda t: torch._foreach_add_([t], 1.0),
    "no grad": torch.no_grad()(lambda t: t.copy_(t + 1)),
    "inference mode": torch.inference_mode()(lambda t: t[1:].mul_(2)),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_into_shared_memory_are_refused(name: str) -> None:
    batch = make_batch(4)
    received, views = through_shared_memory(batch)
    before = [bytes(view) for view in views]
    with pytest.raises((RuntimeError, ValueError), match=r"would write into a column that other processes|read-only"):
        WRITES[name](received.batch["float32"])
    assert [bytes(view) for view in views] == before


def test_writes_through_the_tensordict_and_numpy_columns_are_refused() -> None:
    received, _ = through_shared_memory(make_batch(4))
    with pytest.raises(RuntimeError, match=r"clone\(\), or batch.writable\(\)"):
        received.batch.zero_()
    with pytest.raises(ValueError, match="read-only"):
        received.non_tensor_batch["number"][0] = 1.0
    with pytest.raises(RuntimeError, match="would write"):
        received[1:3].batch["float32"].zero_()


def test_reading_gives_ordinary_tensors_and_autograd_works() -> None:
    received, _ = through_shared_memory(make_batch(4))
    column = received.batch["float32"]
    for result in (column + 1, column.clone(), column.to(torch.float64), column[[0, 1]], torch.cat([column, column])):
        assert type(result) is torch.Tensor
    copied = copy.deepcopy(column)
    assert type(copied) is torch.Tensor
    weight = torch.ones(3, requires_grad=True)
    (column @ weight).sum().backward()
    assert torch.equal(weight.grad, column.sum(0))
    other = torch.zeros(4, 3)
    other.copy_(column)
    other += column
    assert torch.equal(other, column * 2)
    embedded = torch.nn.functional.embedding(received.batch["int64"], torch.eye(4))
    assert embedded.shape == (4, 3, 4)


def test_compiled_functions_take_read_only_columns() -> None:
    received, _ = through_shared_memory(make_batch(4))
    column = received.batch["float32"]
    compiled = torch.compile(lambda x: (x * 2).sum(-1) + x[:, 0].view(-1), backend="eager", fullgraph=True)
    assert torch.equal(compiled(column), (column * 2).sum(-1) + column[:, 0])


def test_writable_copies_shared_columns_only() -> None:
    received, views = through_shared_memory(make_batch(4))
    before = [bytes(view) for view in views]
    own = received.writable()
    own.batch["float32"].zero_()
    own.non_tensor_batch["number"][0] = 9.0
    assert [bytes(view) for view in views] == before
    mine = make_batch(4)
    assert mine.writable().batch["float32"].data_ptr() == mine.batch["float32"].data_ptr()


def test_a_received_batch_can_be_sent_again() -> None:
    batch = make_batch(4)
    received, _ = through_shared_memory(batch)
    again, _ = through_shared_memory(received[1:])
    assert_same(again, batch[1:])
    assert type(pickle.loads(pickle.dumps(received.batch["float32"]))) is torch.Tensor


def test_disk_round_trip_is_whole_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "step" / "batch.safetensors"
    batch = make_batch(5)
    batch.save_to_disk(path)
    assert_same(DataProto.load_from_disk(path), batch)
    assert stat.S_IMODE(path.stat().st_mode) & 0o400
    bad = DataProto.from_dict(non_tensors={"f": [lambda: None]})
    with pytest.raises(TypeError, match="function cannot be written to a file"):
        bad.save_to_disk(path)
    assert_same(DataProto.load_from_disk(path), batch)
    assert [entry.name for entry in path.parent.iterdir()] == ["batch.safetensors"]
    save_plain({"no": "batch"}, path)
    with pytest.raises(PlainFileError, match="holds no DataProto"):
        DataProto.load_from_disk(path)


def _cyclic(value: int = 1, *, with_tensor: bool = False) -> DataProto:
    itself: list[Any] = [value, torch.ones(2)] if with_tensor else [value]
    itself.append(itself)
    mapping: dict[str, Any] = {"list": itself, "pair": (itself, value)}
    mapping["me"] = mapping
    array = np.empty(1, dtype=object)
    array[0] = array
    return DataProto.from_dict({"rows": torch.zeros(3)}, {"odd": [itself, mapping, array]}, {"meta": mapping})


def test_none_is_an_empty_part() -> None:
    batch = DataProto(batch=None, non_tensor_batch=None, meta_info=None)  # pyrefly: ignore[bad-argument-type]
    assert (len(batch), batch.non_tensor_batch, batch.meta_info) == (0, {}, {})
    assert (
        len(DataProto.concat([DataProto.from_dict({"a": torch.zeros(2)}), DataProto.from_dict({"a": torch.ones(2)})]))
        == 4
    )


def test_entries_that_contain_themselves_are_compared() -> None:
    assert _cyclic().equals(_cyclic())
    assert not _cyclic().equals(_cyclic(2))
    assert _cyclic(with_tensor=True).equals(_cyclic(with_tensor=True))
    assert len(_cyclic().union(_cyclic())) == 3


@pytest.mark.parametrize("with_tensor", [False, True])
def test_entries_that_contain_themselves_travel(with_tensor: bool) -> None:
    batch = _cyclic(with_tensor=with_tensor)
    arrived = pickle.loads(pickle.dumps(batch))
    assert arrived.equals(batch)
    itself, mapping, array = arrived.non_tensor_batch["odd"]
    assert itself[-1] is itself
    assert mapping["me"] is mapping
    assert array[0] is array
    assert mapping["list"] is itself


def test_entries_that_contain_themselves_are_not_written_to_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a list that contains itself cannot be written to a file"):
        _cyclic().save_to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_an_entry_that_stands_in_two_places_is_written(tmp_path: Path) -> None:
    entry = [1, {"a": 2}]
    batch = DataProto.from_dict({"rows": torch.zeros(2)}, {"odd": [entry, entry]}, {"again": [entry, entry]})
    batch.save_to_disk(tmp_path / "batch")
    assert DataProto.load_from_disk(tmp_path / "batch").equals(batch)
