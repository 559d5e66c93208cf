"""SIGTERM and Ctrl-C: stop after the current phase, with a checkpoint. A second signal ends the run at once.

A step that has not begun to update weights is abandoned, and the checkpoint is of the step before: a resumed run
repeats the step. Once an update has begun, the step is finished first.
"""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_UPDATES = ("update_critic", "update_actor")


class Interrupted(KeyboardInterrupt):
    """A signal that ends the run at once."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopAfterPhase(Exception):
    """The current step is not finished: its weights are those of the step before."""


class StopRequest:
    """Whether a signal asked the run to stop. Handled while `listening`; before training a signal ends it at once."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.is_training = False
        self.phase: str | None = None
        """The last phase that has ended."""
        self.asked_by: str | None = None
        """Who asked the run to end after the current step, other than a signal."""
        self._can_give_up = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take over SIGTERM and SIGINT. In a thread that is not the main one signals stay as they are."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python

    @contextmanager
    def training(self) -> Iterator[None]:
        """Inside, the first signal waits for the end of a phase."""
        self.is_training = True
        try:
            yield
        finally:
            self.is_training = False

    @property
    def name(self) -> str | None:
        """The signal that was sent, or who else asked to stop; None: go on."""
        return self.asked_by if self.signum is None else signal.Signals(self.signum).name

    def begin_step(self) -> None:
        self._can_give_up = True

    def keep_step(self) -> None:
        """The step in progress is finished first, whatever is asked from here on."""
        self._can_give_up = False

    def phase_ended(self, phase: str) -> None:
        """Called after each phase; raises `StopAfterPhase` where a step can be given up."""
        self.phase = phase
        if phase == "step" or phase in _UPDATES:
            self._can_give_up = False
        if self.signum is not None and self._can_give_up:
            raise StopAfterPhase

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None or not self.is_training:
            raise Interrupted(signum)
        self.signum = signum
        sys.stderr.write(f"\n{self.name}: the run ends after this phase, with a checkpoint. Once more ends it now.\n")


def resume_line(*, resume_mode: str = "auto") -> str:
    """The command that continues this run: the one that started it."""
    words = list(sys.argv[1:])
    if resume_mode != "auto":
        words = [word for word in words if not word.startswith(("trainer.resume_mode=", "trainer.resume_from_path="))]
        words.append("trainer.resume_mode=auto")
    program = Path(sys.argv[0]).name
    if program == "__main__.py" or program.endswith(".py"):
        module = getattr(sys.modules.get("__main__"), "__spec__", None)
        name = module.name.removesuffix(".__main__") if module is not None else None
        start = ["python", "-m", name] if name else ["python", sys.argv[0]]
        return shlex.join([*start, *words])
    return shlex.join([program, *words])
