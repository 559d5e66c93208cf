"""What one process does from one call to another: the calls it computes, or the memory it takes on its GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

_MOST_EVENTS = 1_000_000
"""Allocations and frees that are kept, the newest; some hundred bytes each on the host."""


class StepProfile(Protocol):
    """Records until `finish`, which writes a file and returns its path."""

    def finish(self) -> str: ...


def start_step_profile(tool: str, stem: Path, device: torch.device) -> StepProfile:
    """Begin to record with `global_profiler.tool`; the file's name begins with that of `stem`."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    if tool == "torch_memory":
        return MemoryHistory(stem.with_name(f"{stem.name}.memory.pickle"))
    return StepTrace(stem.with_name(f"{stem.name}.pt.trace.json.gz"), device)


class MemoryHistory:
    """Every allocation and free on this process's GPU with the stack it came from, as docs.pytorch.org/memory_viz
    opens it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)

    def finish(self) -> str:
        torch.cuda.memory._dump_snapshot(str(self._path))
        torch.cuda.memory._record_memory_history(enabled=None)
        return str(self._path)


class StepTrace:
    """Everything that this process computes, as a trace that Perfetto and chrome://tracing open."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path = path
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def finish(self) -> str:
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
        return str(self._path)
