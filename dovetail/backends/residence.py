"""Remember which parts of a backend are in host memory, and refuse to use them there. Moves nothing itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dovetail.backends.base import TrainBackend


class Residence:
    """Where the parameters and the optimizer's state of one backend are. Its parts are "params" and "optimizer"."""

    def __init__(self) -> None:
        self._away: set[str] = set()

    def leave(self, *, params: bool, optimizer: bool) -> None:
        """These parts are in host memory now."""
        self._away |= _chosen(params, optimizer)

    def come_back(self, *, params: bool, optimizer: bool) -> None:
        """These parts are on the device now."""
        self._away -= _chosen(params, optimizer)

    def require(self, *parts: str) -> None:
        """Raise unless these parts are on the device."""
        # Checked on the CPU too, where nothing moves: a laptop run then finds the missing call before a cluster does.
        away = sorted(self._away.intersection(parts))
        if away:
            raise RuntimeError(f"{' and '.join(away)} are offloaded; call onload() first")

    @contextmanager
    def everything_here(self, backend: TrainBackend) -> Iterator[None]:
        """Bring what is away back for a while, then offload it again."""
        away = set(self._away)
        backend.onload(params="params" in away, optimizer="optimizer" in away)
        try:
            yield
        finally:
            if away:
                backend.offload(params="params" in away, optimizer="optimizer" in away)


def _chosen(params: bool, optimizer: bool) -> set[str]:
    return {part for part, chosen in (("params", params), ("optimizer", optimizer)) if chosen}
