"""Profile the steps that `global_profiler.steps` names, in the processes that it names; say where traces are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.config.profiler import ProfilerConfig
from dovetail.controller import WorkerGroup

logger = logging.getLogger(__name__)


@contextmanager
def profiled(settings: ProfilerConfig, step: int, group: WorkerGroup, run_folder: Path) -> Iterator[None]:
    """Around one step. Does nothing for steps that were not chosen. A step that fails leaves no file."""
    if step not in settings.chosen_steps:
        yield
        return
    # Absolute: a worker's current folder may be another one.
    folder = (Path(settings.save_path) if settings.save_path else run_folder / "profile").expanduser().resolve()
    group.start_profile(str(folder), step)
    yield
    viewer = "docs.pytorch.org/memory_viz" if settings.tool == "torch_memory" else "ui.perfetto.dev"
    for path in filter(None, group.stop_profile()):
        logger.info("step %d: profile in %s (open it in %s)", step, path, viewer)
