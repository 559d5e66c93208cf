"""How much memory this process uses on its device and on the host, and giving unused device memory back."""

from __future__ import annotations

import gc

import torch

from dovetail.observability.device_peaks import DevicePeaks, cuda_peaks
from dovetail.observability.host_memory import peak_resident_gib

_GIB = 1024**3
_DRIVERS_SHARE = 0.1


def memory_in_use(device: torch.device) -> dict[str, float]:
    """GiB. Peaks are since the process began: over all phases, though each of them has a peak of its own."""
    memory = {"memory/host_peak_gib": peak_resident_gib()}
    if device.type == "cuda":
        peaks = _peaks(device).of_run()
        memory |= {
            "memory/allocated_gib": torch.cuda.memory_allocated(device) / _GIB,
            "memory/reserved_gib": torch.cuda.memory_reserved(device) / _GIB,
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
