"""Choose a server for each request: the one that has served its key before, else the one with the least to do.

Sticky, because a server that has seen a conversation or a group's prompt holds it in its prefix cache. Pure
bookkeeping, safe from any thread: sends nothing, and hears about servers that leave or return from its owner.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Self

from dovetail.rollout.base import EngineError

MAX_STICKY_KEYS = 65536


class NoServerError(EngineError):
    """No server is up. The message names each one and why it is down."""


class Lease:
    """One request on one server. Released once, however often `release` is called; a context manager.

    `lost` says that the server went down while it was held: the request must go to another one.
    """

    __slots__ = ("_router", "lost", "server")

    def __init__(self, router: Router, server: str) -> None:
        self._router = router
        self.server = server
        self.lost = False

    def release(self) -> None:
        self._router._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class Router:
    """`acquire` a lease for every request and release it when the answer is there.

    The load of a server is the number of its leases. A key stays with its server for as long as that is up,
    also when it has more to do than others; a key whose server left moves, and does not move back when it returns.
    Keys not seen for the last `max_sticky_keys` others are forgotten.
    """

    def __init__(self, servers: Iterable[str], *, max_sticky_keys: int = MAX_STICKY_KEYS) -> None:
        names = list(servers)
        if not names:
            raise ValueError("a router needs at least one server.")
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(f"server {sorted(repeated)[0]!r} is given twice; each has one place in the router.")
        self._lock = threading.Lock()
        self._leases: dict[str, set[Lease]] = {name: set() for name in names}
        self._down: dict[str, str] = {}
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._max_sticky_keys = max_sticky_keys

    @property
    def servers(self) -> tuple[str, ...]:
        """All of them, up or down, in the order they were given."""
        return tuple(self._leases)

    def up(self) -> tuple[str, ...]:
        with self._lock:
            return self._up()

    def down(self) -> dict[str, str]:
        """Why each server that is down is down."""
        with self._lock:
            return dict(self._down)

    def loads(self) -> dict[str, int]:
        """Leases on each server."""
        with self._lock:
            return {name: len(leases) for name, leases in self._leases.items()}

    def acquire(self, key: str | None = None) -> Lease:
        """A lease on the key's server, or on the least loaded one. Raises NoServerError when none is up."""
        with self._lock:
            up = self._up()
            if not up:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in self._down.items())
                raise NoServerError(f"none of {len(self._leases)} servers is up ({reasons}).")
            server = self._sticky.get(key) if key is not None else None
            if server not in up:
                # Equal loads are split by a hash of key and server, so that several routers over the same servers do
                # not all begin with the first.
                server = min(up, key=lambda name: (len(self._leases[name]), _hash(key, name)))
            assert server is not None, "there is at least one choice"
            if key is not None:
                self._sticky[key] = server
                self._sticky.move_to_end(key)
                if len(self._sticky) > self._max_sticky_keys:
                    self._sticky.popitem(last=False)
            lease = Lease(self, server)
            self._leases[server].add(lease)
            return lease

    def mark_down(self, server: str, reason: str) -> list[Lease]:
        """The server takes no more requests; the leases that were on it, now lost. Theirs is nobody's load."""
        self._check(server)
        with self._lock:
            self._down.setdefault(server, reason)
            lost, self._leases[server] = list(self._leases[server]), set()
            for lease in lost:
                lease.lost = True
            return lost

    def mark_up(self, server: str) -> None:
        """The server takes requests again."""
        self._check(server)
        with self._lock:
            self._down.pop(server, None)

    def _release(self, lease: Lease) -> None:
        with self._lock:
            self._leases[lease.server].discard(lease)

    def _up(self) -> tuple[str, ...]:
        return tuple(name for name in self._leases if name not in self._down)

    def _check(self, server: str) -> None:
        if server not in self._leases:
            raise ValueError(f"{server!r} is no server of this router; it has {', '.join(self._leases)}.")


def _hash(key: str | None, name: str) -> bytes:
    return hashlib.blake2b(f"{key}\x1f{name}".encode(), digest_size=8).digest()
