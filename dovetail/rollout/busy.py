"""When something had work: spans for a timeline. Not locked."""

from __future__ import annotations

import time
from collections import deque

_MOST_SPANS = 1024


class BusySpans:
    """Call `note` whenever there may be work, or none any more."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=_MOST_SPANS)
        self._since: float | None = None

    def note(self, is_busy: bool) -> None:
        if is_busy and self._since is None:
            self._since = time.time()
        elif not is_busy and self._since is not None:
            self._spans.append((self._since, time.time()))
            self._since = None

    def take(self) -> list[tuple[float, float]]:
        """Since the last call: start and end in seconds since the epoch."""
        spans, now = list(self._spans), time.time()
        self._spans.clear()
        if self._since is not None:
            spans.append((self._since, now))
            self._since = now
        return spans
