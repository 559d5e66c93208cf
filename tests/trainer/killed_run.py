"""A run in a process of its own that is killed with SIGKILL at a chosen moment."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from pathlib import Path
from typing import Literal

from dovetail.config.root import DovetailConfig
from dovetail.observability.console import StepConsole
from dovetail.trainer.run import run_training
from tests.programs import exit_code

Moment = Literal["generation", "update", "save", "after_save", "any"]
_PHASES = {"generation": "gen", "update": "update_actor", "save": "save_checkpoint", "after_save": "save_checkpoint"}
DIED_IN = "died_in.txt"
_LIMIT_S = 120


def run_until_killed(config: DovetailConfig, moment: Moment, step: int = 0, *, after: float = 0.0) -> int:
    """Returns the exit code: -9 when the kill came, 0 when the run was over first.

    The moment `any` is `after` seconds from the first phase of the run, whatever it does then.
    """
    process = mp.get_context("forkserver").Process(target=_train, args=(config, moment, step, after))
    return exit_code(process, _LIMIT_S, lambda: f"a run that has not reached the moment {moment!r} of step {step}")


def _train(config: DovetailConfig, moment: Moment, step: int, after: float) -> None:
    import torch

    torch.set_num_threads(1)
    run_training(config, use_ray=False, console=lambda title, total: _Killer(config, moment, step, after))


class _Killer(StepConsole):
    """A console, because that is who is told about phases."""

    def __init__(self, config: DovetailConfig, moment: Moment, step: int, after: float) -> None:
        self._folder = Path(config.trainer.run_dir)
        self._moment, self._step, self._after = moment, step, after
        self._phase: str | None = None
        self._steps_begun = 0

    def phase(self, name: str | None) -> None:
        before, self._phase = self._phase, name
        if self._moment == "any":
            if before is None and self._steps_begun == 0:
                self._steps_begun = 1
                threading.Thread(target=self._die_soon, daemon=True).start()
            return
        self._steps_begun += name == "gen"
        if self._steps_begun != self._step:
            return
        if self._moment == "after_save":
            if before == "save_checkpoint":
                self._die()
        elif name == _PHASES[self._moment]:
            threading.Thread(target=self._die_soon, daemon=True).start()

    def _die_soon(self) -> None:
        if self._moment == "save":
            # As soon as the weights are being written.
            shards = self._folder / f".global_step_{self._step}.partial" / "actor" / "shards"
            while not shards.exists():
                os.sched_yield()
        elif self._moment == "any":
            time.sleep(self._after)  # the kill comes at a time, whatever the run is doing then
        self._die()

    def _die(self) -> None:
        (self._folder / DIED_IN).write_text(str(self._phase))
        os.kill(os.getpid(), signal.SIGKILL)
