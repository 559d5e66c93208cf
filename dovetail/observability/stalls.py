"""Who waits for whom in an asynchronous run, and the sentence that names the oldest chain of waits.

    waits.waiting("trainer", "draw 12", since=now)
    waits.waiting("draw 12", "engine 1", "engine", since=last_token)     # again with each token: that is progress
    waits.check(now, limit_s=300)                                        # raises StalledError, which names the chain

A stall is a chain whose last wait made no progress for the limit: the trainer may wait for a draw for an hour as long
as the engine generates tokens for it. Reads no clock and starts no thread; the caller gives the time, in seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

STALLED_EXIT_CODE = 75
"""Of a run that stopped because of a stall. sysexits.h calls it a temporary failure: the same command continues it."""

_MOST_NAMED = 5


class StalledError(RuntimeError):
    """Nothing moves any more; the message says who waits for whom. Commands exit with `STALLED_EXIT_CODE`."""


@dataclass(frozen=True)
class _Edge:
    who: str
    what: str
    kind: str
    since: float

    def __str__(self) -> str:
        return f"{self.who} waits for {self.what}"


class Waits:
    """The open waits by who waits and for what. Threads may share it."""

    def __init__(self) -> None:
        self._edges: dict[str, dict[str, _Edge]] = {}
        self._lock = threading.Lock()

    def waiting(self, who: str, what: str, kind: str = "", *, since: float) -> None:
        """`who` waits for `what` since a time; a later time for the same pair is progress.

        `kind="engine"`: `since` is the time of the engine's last token.
        """
        with self._lock:
            self._edges.setdefault(who, {})[what] = _Edge(who, what, kind, since)

    def clear(self) -> None:
        """Nobody waits any longer."""
        with self._lock:
            self._edges = {}

    def words(self, now: float) -> str:
        """The oldest chain: `the trainer waits for draw 12 for 40 s; draw 12 waits for engine 0, ...`; empty: nobody
        waits."""
        with self._lock:
            return self._words(chain, now) if (chain := self._oldest_chain()) else ""

    def check(self, now: float, limit_s: float) -> None:
        """Raise `StalledError` when a chain has made no progress for `limit_s`; 0: never."""
        with self._lock:
            chain = self._oldest_chain()
            if limit_s and chain and now - chain[-1].since >= limit_s:
                raise StalledError(f"no progress for {now - chain[-1].since:.0f} s: {self._words(chain, now)}.")

    def _oldest_chain(self) -> list[_Edge]:
        """From somebody for whom nobody waits, down to the wait without progress for longest."""
        waited_for = {what for edges in self._edges.values() for what in edges}
        roots = [who for who in self._edges if who not in waited_for] or list(self._edges)
        chains = [chain for root in roots for chain in self._chains(root, ())]
        return list(min(chains, key=lambda chain: (chain[-1].since, -len(chain)), default=()))

    def _chains(self, who: str, above: tuple[_Edge, ...]) -> Iterator[tuple[_Edge, ...]]:
        for edge in self._edges.get(who, {}).values():
            chain = (*above, edge)
            closes_a_circle = any(edge.what == earlier.who for earlier in chain)
            if edge.what in self._edges and not closes_a_circle:
                yield from self._chains(edge.what, chain)
            else:
                yield chain

    def _words(self, chain: list[_Edge], now: float) -> str:
        words = "; ".join(self._hop(edge, now) for edge in chain)
        circle = any(chain[-1].what == edge.who for edge in chain)
        return f"{words}: they wait for each other" if circle else words

    def _hop(self, edge: _Edge, now: float) -> str:
        if edge.kind == "engine":
            return f"{edge}, its last token {now - edge.since:.0f} s ago"
        alike = [other for other in self._edges[edge.who].values() if _family(other.what) == _family(edge.what)]
        if len(alike) == 1:
            return f"{edge} for {now - edge.since:.0f} s"
        alike.sort(key=lambda other: (other is not edge, other.since))
        numbers = ", ".join(other.what.rpartition(" ")[2] for other in alike[:_MOST_NAMED])
        more = f" and {len(alike) - _MOST_NAMED} more" if len(alike) > _MOST_NAMED else ""
        oldest = now - min(other.since for other in alike)
        return f"{edge.who} waits for {_family(edge.what)}s {numbers}{more} (oldest {oldest:.0f} s)"


def _family(what: str) -> str:
    """`draw` of `draw 12`: what is named together. A name without a number is its own family."""
    name, _, number = what.rpartition(" ")
    return name if name and number.isdigit() else what
