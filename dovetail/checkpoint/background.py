"""Write a snapshot in a thread while training goes on. One at a time: the next save waits for this one."""

from __future__ import annotations

import threading
from pathlib import Path

import torch.distributed as dist

from dovetail.checkpoint.sharded import StateSnapshot, write_snapshot
from dovetail.observability.waits import waiting

LIMIT_S = 3600.0
"""A save that takes longer than this hangs, on a dead disk or in a collective with a rank that is gone."""


class BackgroundSave:
    """One writer per model and process. Every rank calls `start` and `finish` alike.

    The thread's collectives go over a group of their own (gloo, on the host): in the group of training they would meet
    the collectives of the step that runs meanwhile.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._folder = Path()
        self._error: BaseException | None = None
        self._group: dist.ProcessGroup | None = None

    def start(self, folder: Path, snapshot: StateSnapshot) -> None:
        """Begin to write; returns at once, unless the last save is not over yet."""
        self.finish()
        if dist.is_initialized() and self._group is None:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup), "every rank saves, so every rank is in the group"
            self._group = group
        self._folder = folder
        self._thread = threading.Thread(target=self._write, args=(folder, snapshot), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the save that runs, if one does, and raise what went wrong in it. `WaitTimeout` after `LIMIT_S`."""
        if self._thread is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            with waiting(f"rank {rank}", f"its save in the background of {self._folder}", limit_s=LIMIT_S) as wait:
                self._thread.join(wait.left())
                if self._thread.is_alive():
                    raise wait.error()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, folder: Path, snapshot: StateSnapshot) -> None:
        try:
            write_snapshot(folder, snapshot, self._group)
        except BaseException as error:  # noqa: BLE001  kept for `finish`: a thread has nobody to raise to
            self._error = error
