"""The garbage collector skips frozen objects and still sees new ones; nothing stays frozen by mistake."""

from __future__ import annotations

import gc
import weakref

import pytest

from dovetail.controller.freeze_gc import freeze_gc, frozen_gc

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("unfrozen")]


class Node:
    """Half of a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


def cycle() -> weakref.ref[Node]:
    one, two = Node(), Node()
    one.other, two.other = two, one
    return weakref.ref(one)


def test_garbage_is_freed_first_and_later_garbage_still_is() -> None:
    gc.disable()
    try:
        before = cycle()
        assert before() is not None
        freeze_gc()
        assert before() is None
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < 1_000, "what a collection walks over"
        after = cycle()
        gc.collect()
        assert after() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_lives_on_is_as_it_was(fails: bool) -> None:
    def work() -> None:
        with frozen_gc() as freeze_here:
            freeze_here()
            assert gc.get_freeze_count() > 0
            if fails:
                raise KeyError("step 3")

    if fails:
        with pytest.raises(KeyError, match="step 3"):
            work()
    else:
        work()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("freezes_too", [False, True])
def test_what_somebody_else_froze_stays_frozen(freezes_too: bool) -> None:
    gc.freeze()
    with frozen_gc() as freeze_here:
        if freezes_too:
            freeze_here()
    assert gc.get_freeze_count() > 0
