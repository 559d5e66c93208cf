"""Peak memory of this process on the host, and of single phases on a device whose counter knows one peak only.

The counter is set back at each edge of a phase, so phases may nest; the peak of the whole run is kept beside them. What
the device has in use beyond the counter is added: the driver, other processes, and, as a negative number, what an
engine has unmapped in its sleep while the counter still counts it. Between two edges the lower of both is taken: a peak
is never overstated, and it is exact when engines fall asleep and wake at edges (`mark`). Knows torch only as the module
it is given.
"""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dovetail.config.units import GIB


def peak_resident_gib() -> float:
    """The largest resident set since the process began."""
    # Kibibytes on Linux, bytes on a Mac.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1024**3


class CudaCounter:
    """Bytes on one device, by `torch.cuda`: of this process's allocator, and of all processes."""

    def __init__(self, cuda: Any, device: int) -> None:
        self._cuda, self._device = cuda, device

    def allocated(self) -> int:
        return self._cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        return self._cuda.memory_reserved(self._device)

    def peak_allocated(self) -> int:
        """Since the last `reset_peaks`."""
        return self._cuda.max_memory_allocated(self._device)

    def peak_reserved(self) -> int:
        return self._cuda.max_memory_reserved(self._device)

    def reset_peaks(self) -> None:
        self._cuda.reset_peak_memory_stats(self._device)

    def in_use(self) -> int:
        """By every process, as the driver counts."""
        free, total = self._cuda.mem_get_info(self._device)
        return total - free


@dataclass(eq=False)
class Phase:
    """`peak_gib` is on the device, by all its processes; None before the phase has ended."""

    peak_gib: float | None = None
    peak_bytes: int = 0


@dataclass(frozen=True)
class RunPeaks:
    """GiB of this process's allocator since the process began."""

    allocated_gib: float
    reserved_gib: float


class DevicePeaks:
    """`with peaks.phase() as phase: ...`, then `phase.peak_gib`; `peaks.of_run()`: phases and what lay between."""

    def __init__(self, counter: CudaCounter) -> None:
        self._counter = counter
        self._lock = threading.Lock()
        self._open: list[Phase] = []
        self._run_allocated = self._run_reserved = 0
        self._edge = self._look()

    @contextmanager
    def phase(self) -> Iterator[Phase]:
        """What happens inside. A phase that raises has no peak."""
        phase = Phase()
        with self._lock:
            self._fold()
            self._open.append(phase)
        try:
            yield phase
        finally:
            with self._lock:
                self._fold()
                self._open.remove(phase)
        phase.peak_gib = phase.peak_bytes / GIB

    def mark(self) -> None:
        """An edge inside a phase: an engine has just woken, or is about to fall asleep."""
        with self._lock:
            self._fold()

    def of_run(self) -> RunPeaks:
        with self._lock:
            allocated = max(self._run_allocated, self._counter.peak_allocated())
            reserved = max(self._run_reserved, self._counter.peak_reserved())
        return RunPeaks(allocated / GIB, reserved / GIB)

    def _fold(self) -> None:
        """Give the peak since the last edge to the run and to every open phase, and begin again from here."""
        peak, before, now = self._counter.peak_allocated(), self._edge, self._look()
        self._run_allocated = max(self._run_allocated, peak)
        self._run_reserved = max(self._run_reserved, self._counter.peak_reserved())
        on_device = max(before.used, now.used, peak + min(before.beyond, now.beyond))
        for phase in self._open:
            phase.peak_bytes = max(phase.peak_bytes, on_device)
        self._counter.reset_peaks()
        self._edge = now

    def _look(self) -> _Edge:
        allocated = self._counter.allocated()
        # Memory that torch keeps for later is counted neither here nor in the peak: it is there to be used.
        beyond = self._counter.in_use() - self._counter.reserved()
        return _Edge(beyond, used=allocated + beyond)


def cuda_peaks(cuda: Any, device: int) -> DevicePeaks:
    """The one of this process for a device, as torch's counters are one per process: `cuda_peaks(torch.cuda, 0)`."""
    if (cuda, device) not in _OF_PROCESS:
        _OF_PROCESS[cuda, device] = DevicePeaks(CudaCounter(cuda, device))
    return _OF_PROCESS[cuda, device]


@dataclass(frozen=True)
class _Edge:
    """Bytes on the device: `beyond` what the allocator holds, and `used` together with what is allocated of it."""

    beyond: int
    used: int


_OF_PROCESS: dict[tuple[Any, int], DevicePeaks] = {}
