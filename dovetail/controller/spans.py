"""When a process worked on which call, and how much memory it had: the data of a timeline.

Memory is in GiB. With a GPU: the most that was in use on the device, by all its processes, during the call
(`observability.memory`). Without: the largest resident set seen during the call.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dovetail.config.units import GIB
from dovetail.observability.memory import cuda_peaks, peak_resident_gib

# A process that nobody asks for its spans must not grow.
_MOST_KEPT = 4096
_SAMPLE_S = 0.05
_STATM = "/proc/self/statm"


@dataclass(frozen=True)
class Span:
    """One call in one process; times are seconds since the epoch."""

    role: str
    method: str
    start: float
    end: float
    memory_gib: float | None


class SpanRecorder:
    """`with recorder.recording(role, method): ...`; `take` hands the spans over and forgets them."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=_MOST_KEPT)

    @contextmanager
    def recording(self, role: str, method: str) -> Iterator[None]:
        """A call that raises is not recorded: its step will not be either."""
        start = time.time()
        with _memory_watch() as watch:
            yield
        self._spans.append(Span(role, method, start, time.time(), watch.gib))

    def take(self) -> list[Span]:
        taken = list(self._spans)
        self._spans.clear()
        return taken


class _Watch:
    gib: float | None = None


@contextmanager
def _memory_watch() -> Iterator[_Watch]:
    watch = _Watch()
    cuda = _cuda_in_use()
    if cuda is not None:
        with cuda_peaks(cuda, cuda.current_device()).phase() as phase:
            yield watch
        watch.gib = phase.peak_gib
        return
    over = threading.Event()
    sampler = threading.Thread(target=_sample, args=(watch, over), name="memory of a call", daemon=True)
    sampler.start()
    try:
        yield watch
    finally:
        over.set()
        sampler.join()
    if _cuda_in_use() is not None:
        watch.gib = None  # the call that starts the device: what the host held is no number of the device


def _cuda_in_use() -> Any:
    """`torch.cuda` once it has started; this module never imports torch, nor starts a device."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _sample(watch: _Watch, over: threading.Event) -> None:
    """Resident size until the call is over, at its beginning and its end too."""
    while True:
        watch.gib = max(watch.gib or 0.0, _resident_gib())
        if over.is_set():
            return
        over.wait(_SAMPLE_S)


def _resident_gib() -> float:
    try:
        with open(_STATM) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB
    except OSError:  # not Linux: the most that this process ever had
        return peak_resident_gib()
