"""Log lines of a worker carry its role and rank. Formats records; never decides what is worth logging.

In a process that hosts several roles the role is that of the call being run, so a line of the critic reads
``[critic 1/4]`` although the actor lives in the same process.
"""

from __future__ import annotations

import contextvars
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FORMAT = "%(asctime)s %(levelname)s [%(role)s %(rank)s/%(world_size)s] %(name)s: %(message)s"


def configure_worker_logging(role: str, rank: int, world_size: int) -> None:
    """Send this process's log records to stderr with role and rank. Calling it again replaces the names.

    The level comes from ``DOVETAIL_LOGGING_LEVEL`` (default INFO for dovetail, WARNING for other libraries).
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _WorkerHandler)]:
        root.removeHandler(handler)
    handler = _WorkerHandler(sys.stderr)
    handler.addFilter(RoleFilter(role, rank, world_size))
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    root.addHandler(handler)
    logging.getLogger("dovetail").setLevel(os.environ.get("DOVETAIL_LOGGING_LEVEL", "INFO"))


@contextmanager
def logging_as(role: str) -> Iterator[None]:
    """Records made inside this block belong to ``role``."""
    token = _ROLE.set(role)
    try:
        yield
    finally:
        _ROLE.reset(token)


class RoleFilter(logging.Filter):
    """Adds ``role``, ``rank`` and ``world_size`` to every record."""

    def __init__(self, role: str, rank: int, world_size: int) -> None:
        super().__init__()
        self._default = role
        self._rank = rank
        self._world_size = world_size

    def filter(self, record: logging.LogRecord) -> bool:
        record.role = _ROLE.get() or self._default
        record.rank = self._rank
        record.world_size = self._world_size
        return True


class _WorkerHandler(logging.StreamHandler):
    """A class of its own so that a second configuration finds and replaces the first."""


_ROLE: contextvars.ContextVar[str | None] = contextvars.ContextVar("logging_role", default=None)
