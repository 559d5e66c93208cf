"""Wall-clock time of the phases of a step, as `timing_s/<phase>` floats. Measures; decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PhaseListener = Callable[[str | None], None]
"""Called with the phase that begins, and with the enclosing one (or None) when it ends."""


class PhaseTimers:
    """`with timers("gen"): ...`. A phase entered twice in a step adds up; phases may be nested."""

    def __init__(
        self,
        on_phase: PhaseListener | None = None,
        *,
        after_phase: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._on_phase = on_phase
        self._after_phase = after_phase
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self.interrupted: str | None = None
        """The innermost phase that an exception has ended; None once another phase begins."""
        self._spans: list[tuple[str, float, float]] = []
        self._to_wall_clock = time.time() - clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._open.append(name)
        self.interrupted = None
        start = self._clock()
        try:
            self._notify()
            yield
        except BaseException:
            self.interrupted = self.interrupted or name
            raise
        finally:
            end = self._clock()
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
            self._spans.append((name, start + self._to_wall_clock, end + self._to_wall_clock))
            self._open.pop()
            self._notify()
        if self._after_phase is not None:  # not after an exception, which it could hide
            self._after_phase(name)

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the last `take`, in the order the phases ended."""
        return dict(self._seconds)

    def take(self) -> dict[str, float]:
        """`{"timing_s/gen": 1.2, ...}`, and start from zero."""
        taken = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken

    def take_spans(self) -> list[tuple[str, float, float]]:
        """`(phase, start, end)` in seconds since the epoch, in the order the phases ended; starts anew."""
        taken, self._spans = self._spans, []
        return taken

    def extend(self, earlier: PhaseTimers) -> None:
        """Take over what `earlier` has measured."""
        self._seconds = earlier._seconds | self._seconds
        self._spans = earlier.take_spans() + self._spans

    def _notify(self) -> None:
        if self._on_phase is not None:
            self._on_phase(self._open[-1] if self._open else None)
