"""Masks of responses: made, cut, joined and laid out as padded sets."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.protocol.sampling_mask import cut_mask, join_masks, make_mask, padded_sets

pytestmark = pytest.mark.unit

SETS = [[7, 3], [5], [1, 2, 9]]


def mask(sets: list[list[int]]) -> np.ndarray:
    return make_mask([np.array(ids, np.int32) for ids in sets])


def test_padded_sets_are_those_a_mask_was_made_of() -> None:
    padded = padded_sets([mask(SETS), mask([]), mask(SETS[1:])], 4)
    none = [-1, -1, -1]
    assert padded.tolist() == [
        [[7, 3, -1], [5, -1, -1], [1, 2, 9], none],
        [none] * 4,
        [[5, -1, -1], [1, 2, 9], none, none],
    ]


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_a_mask_that_is_cut_and_joined_again_is_the_same(length: int) -> None:
    first, second = cut_mask(mask(SETS), length), mask(SETS[length:])
    assert first is not None
    joined = join_masks(first, length, second)
    assert joined is not None
    assert joined.tolist() == mask(SETS).tolist()
    assert joined.dtype == np.int32


def test_tokens_without_a_mask_before_those_with_one_have_empty_sets() -> None:
    joined = join_masks(None, 2, mask([[4]]))
    assert joined is not None
    assert padded_sets([joined], 3).tolist() == [[[-1], [-1], [4]]]
    assert cut_mask(None, 1) is None
