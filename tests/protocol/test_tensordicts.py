"""A batch as one TensorDict and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dovetail.protocol import DataProto

pytestmark = pytest.mark.unit


def batch() -> DataProto:
    return DataProto.from_dict(
        {"ids": torch.arange(6).view(3, 2)},
        {"uid": ["a", "b", "a"], "info": [{"x": 1}, None, [1, 2]], "acc": np.array([0.5, 1.0, 0.0])},
        {"temperature": 1.0, "stop": [1, 2], "metrics": {"loss": [0.1]}},
    )


def test_a_batch_comes_back_as_it_was() -> None:
    again = DataProto.from_tensordict(batch().to_tensordict())
    assert again.difference(batch()) is None
    assert again.non_tensor_batch["acc"].dtype == np.float64


def test_rows_of_the_tensordict_are_rows_of_the_batch() -> None:
    rows = DataProto.from_tensordict(batch().to_tensordict()[1:])
    assert rows.equals(batch()[1:])


def test_tensors_are_the_same_memory() -> None:
    source = TensorDict({"ids": torch.zeros(2, 2)}, batch_size=[2])
    made = DataProto.from_tensordict(source, {"step": 3})
    made.tensors["ids"][0, 0] = 5
    assert source["ids"][0, 0] == 5
    assert made.meta_info == {"step": 3}


def test_an_empty_batch_comes_back() -> None:
    empty = DataProto.from_dict({"ids": torch.zeros(0, 2)}, {"uid": []})
    assert DataProto.from_tensordict(empty.to_tensordict()).equals(empty)
    assert len(DataProto.from_tensordict(None)) == 0


def test_what_cannot_be_one_tensordict_is_named() -> None:
    clash = DataProto.from_dict({"step": torch.zeros(2)}, meta_info={"step": 3})
    with pytest.raises(ValueError, match=r"meta_info \['step'\] have the names of columns"):
        clash.to_tensordict()
    with pytest.raises(ValueError, match="one batch dimension"):
        DataProto.from_tensordict(TensorDict({"a": torch.zeros(2, 2)}, batch_size=[2, 2]))
