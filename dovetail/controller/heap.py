"""Keep Python's garbage collector off what stays to the end: torch, Ray and the models are half a million objects.

A full collection walks over all of them, 0.3 s in which no kernel is launched, and generation makes enough new objects
to cause one every few steps. What is settled is freed when its last reference goes, as ever; a cycle of settled
objects stays.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def settle() -> None:
    """Free what is garbage now, and let no later collection look at what is not."""
    gc.collect()
    gc.freeze()


@contextmanager
def settling() -> Iterator[Callable[[], None]]:
    """`settle` for a process that lives on afterwards: what it settled is subject to collection again at the end."""
    has_settled = False

    def settle_here() -> None:
        nonlocal has_settled
        has_settled = True
        settle()

    try:
        yield settle_here
    finally:
        if has_settled:
            gc.unfreeze()
