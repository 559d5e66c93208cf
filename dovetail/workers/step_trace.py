"""`torch.profiler` from one call to another, written as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepTrace:
    """Records everything that this process computes until `finish`."""

    def __init__(self, path: Path, device: torch.device) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def finish(self) -> str:
        """Write the trace; returns where."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
        return str(self._path)
