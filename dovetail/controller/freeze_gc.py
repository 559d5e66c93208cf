"""`gc.freeze` after warm-up: torch, Ray and the models are half a million objects that live until the process ends.

A full collection walks over all of them, 0.3 s in which no kernel is launched, and generation makes enough new objects
to cause one every few steps. A frozen object is still freed when its last reference goes; a cycle of frozen objects
is never freed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def freeze_gc() -> None:
    """Free what is garbage now, and exclude everything else from later collections."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen_gc() -> Iterator[Callable[[], None]]:
    """Gives `freeze_gc` to a process that lives on afterwards: at the end of the block everything is unfrozen again.

    Python cannot unfreeze a part: where the process had frozen its objects itself, everything stays frozen.
    """
    has_frozen, by_caller = False, gc.get_freeze_count() > 0

    def freeze_here() -> None:
        nonlocal has_frozen
        has_frozen = True
        freeze_gc()

    try:
        yield freeze_here
    finally:
        if has_frozen and not by_caller:
            gc.unfreeze()
