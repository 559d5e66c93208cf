"""How much memory this process uses on its device and on the host, and giving unused device memory back."""

from __future__ import annotations

import gc
import resource

import torch

_GIB = 1024**3


def memory_in_use(device: torch.device) -> dict[str, float]:
    """GiB. Peaks are since the process began or since ``torch.cuda.reset_peak_memory_stats``."""
    # Linux reports the peak resident set in KiB.
    found = {"memory/host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2}
    if device.type == "cuda":
        found |= {
            "memory/allocated_gib": torch.cuda.memory_allocated(device) / _GIB,
            "memory/reserved_gib": torch.cuda.memory_reserved(device) / _GIB,
            "memory/peak_allocated_gib": torch.cuda.max_memory_allocated(device) / _GIB,
            "memory/peak_reserved_gib": torch.cuda.max_memory_reserved(device) / _GIB,
        }
    return found


def free_device_cache(device: torch.device) -> None:
    """Let another process or library have what torch keeps for later."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
