"""SIGTERM and Ctrl-C: stop after the current phase, with a checkpoint. A second signal ends the run at once.

A step that has not begun to update weights is abandoned, and the checkpoint is of the step before: a resumed run
repeats the step. Once an update has begun, the step is finished first.

The same handlers end a main thread that hangs: `end_hung`.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from dovetail.observability.stalls import STALLED_EXIT_CODE

_UPDATES = ("update_critic", "update_actor")
EXIT_S = 20.0
"""How long a main thread that hangs has to end the run. One that hangs outside of Python does not hear of it."""
_RECORD_S = 10.0


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
        self._is_listening = False
        self._hung: Exception | None = None
        self._exit: threading.Timer | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take over SIGTERM and SIGINT. In a thread that is not the main one signals stay as they are."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        self._is_listening = True
        try:
            yield
        finally:
            self._is_listening = False
            if self._exit is not None:
                self._exit.cancel()
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

    def end_hung(self, error: Exception, record: Callable[[Exception], None]) -> None:
        """Called by another thread when the main one hangs: raise `error` there, out of whatever it does.

        Where that does not end the run within `EXIT_S`, end the process. `record` then writes down why. Where signals
        are not ours, because the run is not in the main thread, it only does that.
        """
        if not self._is_listening:
            record(error)
            return
        self._hung = error
        self._exit = threading.Timer(EXIT_S, _exit, (error, record))
        self._exit.daemon = True
        self._exit.start()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._hung is not None:
            hung, self._hung = self._hung, None
            raise hung
        if self.signum is not None or not self.is_training:
            raise Interrupted(signum)
        self.signum = signum
        sys.stderr.write(f"\n{self.name}: the run ends after this phase, with a checkpoint. Once more ends it now.\n")


def _exit(error: Exception, record: Callable[[Exception], None]) -> None:
    """Leave a process whose main thread hangs. The disk may be what hangs."""
    recording = threading.Thread(target=record, args=(error,), daemon=True)
    recording.start()
    recording.join(_RECORD_S)
    sys.stderr.write("\n".join([str(error), *getattr(error, "__notes__", ()), ""]))
    sys.stderr.flush()
    os._exit(STALLED_EXIT_CODE)


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
