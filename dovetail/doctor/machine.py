"""This host and its devices, in words. Starts one program, in the sandbox."""

from __future__ import annotations

import os
import platform
import shutil

from dovetail.config.units import GIB
from dovetail.rewards.sandbox import detect_isolation


def machine() -> list[tuple[str, str]]:
    """This host and its devices, as (what, in words)."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows = [
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("cpu", f"{cores} cores, {memory:.0f} GiB, torch uses {torch.get_num_threads()} of them"),
        ("code rewards", detect_isolation().describe()),
    ]
    if os.path.isdir("/dev/shm"):
        space = shutil.disk_usage("/dev/shm")
        rows.append(("shared memory", f"{space.free / GIB:.1f} of {space.total / GIB:.1f} GiB free in /dev/shm"))
    if not torch.cuda.is_available():
        build = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        return [*rows, ("gpu", f"none; {build}")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        rows.append(
            (
                f"gpu {index}",
                f"{properties.name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free, "
                f"compute capability {properties.major}.{properties.minor}",
            )
        )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [*rows, ("cuda", f"{torch.version.cuda}, NCCL {nccl}")]
