"""Which parts of a backend are offloaded to host memory: remembered, and refused when used there. Moves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dovetail.backends.base import TrainBackend


class OffloadState:
    """Which of a backend's parts, "params" and "optimizer", are offloaded."""

    def __init__(self) -> None:
        self._offloaded: set[str] = set()

    def mark_offloaded(self, *, params: bool, optimizer: bool) -> None:
        self._offloaded |= _chosen(params, optimizer)

    def mark_onloaded(self, *, params: bool, optimizer: bool) -> None:
        self._offloaded -= _chosen(params, optimizer)

    def require(self, *parts: str) -> None:
        """Raise unless these parts are on the device."""
        # Checked on the CPU too, where nothing moves: a laptop run then finds the missing call before a cluster does.
        offloaded = sorted(self._offloaded.intersection(parts))
        if offloaded:
            raise RuntimeError(f"{' and '.join(offloaded)} are offloaded; call onload() first")

    @contextmanager
    def all_onloaded(self, backend: TrainBackend) -> Iterator[None]:
        """Onload what is offloaded for the length of a block, then offload it again."""
        params, optimizer = "params" in self._offloaded, "optimizer" in self._offloaded
        backend.onload(params=params, optimizer=optimizer)
        try:
            yield
        finally:
            if params or optimizer:
                backend.offload(params=params, optimizer=optimizer)


def _chosen(params: bool, optimizer: bool) -> set[str]:
    return {part for part, chosen in (("params", params), ("optimizer", optimizer)) if chosen}
