"""Memory of this process on its device and host, and which parts of a backend are offloaded. Moves nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from dovetail.config.units import GIB
from dovetail.observability.memory import DevicePeaks, cuda_peaks, peak_resident_gib

if TYPE_CHECKING:
    from dovetail.backends.base import TrainBackend

_DRIVERS_SHARE = 0.1


def memory_in_use(device: torch.device) -> dict[str, float]:
    """GiB. Peaks are since the process began: over all phases, though each of them has a peak of its own."""
    memory = {"memory/host_peak_gib": peak_resident_gib()}
    if device.type == "cuda":
        peaks = _peaks(device).of_run()
        memory |= {
            "memory/allocated_gib": torch.cuda.memory_allocated(device) / GIB,
            "memory/reserved_gib": torch.cuda.memory_reserved(device) / GIB,
            "memory/peak_allocated_gib": peaks.allocated_gib,
            "memory/peak_reserved_gib": peaks.reserved_gib,
        }
    return memory


def free_device_cache(device: torch.device) -> None:
    """Let another process or library have what torch keeps for later."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def driver_is_short(device: torch.device) -> bool:
    """Whether what torch does not hold is less than libraries beside it, and CUDA graphs, may ask the driver for."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free < _DRIVERS_SHARE * total


def mark_memory(device: torch.device) -> None:
    """Look at the device now, because an engine has just woken or is about to sleep: see ``DevicePeaks.mark``."""
    if device.type == "cuda":
        _peaks(device).mark()


def _peaks(device: torch.device) -> DevicePeaks:
    return cuda_peaks(torch.cuda, torch.cuda.current_device() if device.index is None else device.index)


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
