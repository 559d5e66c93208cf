"""What does not fit is named; what differs is named."""

from __future__ import annotations

import pytest
import torch

from dovetail.weight_sync import (
    ExpectedWeights,
    WeightAccount,
    WeightMismatchError,
    require_equal,
    tensor_checksum,
    weight_checksum,
)

pytestmark = pytest.mark.unit

EXPECTED = ExpectedWeights({"embed": (4, 2), "norm": (2,), "head": (4, 2)}, ties={"head": "embed"})


def test_an_unknown_and_a_misshapen_tensor_are_named() -> None:
    account = WeightAccount(EXPECTED)
    assert "'other'" in str(account.problem_with("other", (1,)))
    problem = account.problem_with("norm", (3,))
    assert "'norm'" in str(problem)
    assert "(3,)" in str(problem)
    assert "(2,)" in str(problem)


def test_what_never_arrived_is_named_and_a_tied_name_stands_for_both() -> None:
    account = WeightAccount(EXPECTED)
    assert account.problem_with("head", (4, 2)) is None
    assert account.missing() == "no tensor was given for norm."
    account.problem_with("norm", (2,))
    assert account.missing() is None


def test_a_checksum_sees_one_changed_value_and_nothing_else() -> None:
    tensor = torch.randn(5, 3)
    changed = tensor.clone()
    changed[4, 2] = torch.nextafter(changed[4, 2], torch.tensor(9.0))
    assert tensor_checksum(tensor) == tensor_checksum(tensor.t().contiguous().t())
    assert tensor_checksum(tensor) != tensor_checksum(changed)
    assert tensor_checksum(tensor) != tensor_checksum(tensor.bfloat16())
    assert tensor_checksum(tensor, torch.bfloat16) == tensor_checksum(tensor.bfloat16())


def test_a_checksum_sees_values_that_changed_places_also_across_blocks() -> None:
    tensor = torch.randn(70_000, 2)
    for one, other in ((0, 1), (5, 69_000), (100, 32_868)):  # the last two are a block apart
        swapped = tensor.clone()
        swapped[[one, other]] = tensor[[other, one]]
        assert tensor_checksum(tensor) != tensor_checksum(swapped)
    assert tensor_checksum(tensor) == tensor_checksum(tensor.clone())
    assert tensor_checksum(torch.zeros(3)) != tensor_checksum(torch.zeros(4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_device_computes_the_same_checksum(dtype: torch.dtype) -> None:
    tensor = torch.randn(300_000).mul(100).to(dtype)
    assert tensor_checksum(tensor.cuda()) == tensor_checksum(tensor)


def test_minus_zero_is_zero() -> None:
    assert tensor_checksum(torch.tensor([0.0])) == tensor_checksum(torch.tensor([-0.0]))


def test_checksums_cover_only_the_sample() -> None:
    names = [f"layer.{number}" for number in range(50)]
    weights = [(name, torch.zeros(1)) for name in names]
    assert sorted(weight_checksum(weights, names[:5])) == names[:5]
    assert len(weight_checksum(weights)) == 50


def test_a_difference_names_the_tensor_and_an_empty_comparison_proves_nothing() -> None:
    with pytest.raises(WeightMismatchError, match="1 of 2 compared tensors differ in the engine: b"):
        require_equal({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9"}, where="the engine")
    with pytest.raises(WeightMismatchError, match="no tensor could be compared"):
        require_equal({"a": "1"}, {}, where="the engine")
