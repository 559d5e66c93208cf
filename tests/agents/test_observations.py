"""Truncated responses, and calls of one turn that run side by side."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.agents.tools.observations import run_calls, truncate_text

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "(truncated)...6789"), ("right", "0123...(truncated)"), ("middle", "01...(truncated)...89")],
)
def test_a_long_response_is_cut_at_its_side(side: Literal["left", "middle", "right"], text: str) -> None:
    assert truncate_text("0123456789", 4, side) == text
    assert truncate_text("0123", 4, side) == "0123"


@given(st.text(max_size=50), st.integers(1, 60), st.sampled_from(["left", "middle", "right"]))
def test_no_more_is_kept_than_allowed(text: str, length: int, side: Literal["left", "middle", "right"]) -> None:
    kept = truncate_text(text, length, side)
    if len(text) <= length:
        assert kept == text
    else:
        assert "(truncated)" in kept
        assert len(kept) <= length + len("...(truncated)...")


@given(st.integers(0, 12), st.integers(1, 4))
def test_all_calls_run_in_order_and_at_most_so_many_at_a_time(number: int, most: int) -> None:
    running, seen = 0, []

    async def call(index: int) -> int:
        nonlocal running
        running += 1
        seen.append(running)
        for _ in range(number - index):  # the later ones end first
            await asyncio.sleep(0)
        running -= 1
        return index

    assert asyncio.run(run_calls(range(number), call, max_parallel=most)) == list(range(number))
    assert max(seen, default=0) == min(number, most)


def test_the_first_exception_ends_the_other_calls() -> None:
    ended = []

    async def call(index: int) -> None:
        if index == 1:
            raise OSError("gone")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(index)

    with pytest.raises(OSError, match="gone"):
        asyncio.run(run_calls(range(3), call, max_parallel=3))
    assert sorted(ended) == [0, 2]
