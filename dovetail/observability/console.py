"""The console of a run: a live display in a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler

from dovetail.observability.console_view import ConsoleState, draw, plain_line
from dovetail.observability.sinks import ShownAnswer, answer_text

_REFRESHES_PER_SECOND = 4


class StepConsole(Protocol):
    """What the trainer tells a console. Calls come from the driver's thread and must be cheap."""

    def phase(self, name: str | None) -> None:
        """A phase begins; None: no phase is running. Fits `PhaseTimers(on_phase=...)`."""

    def wait(self, words: str) -> None:
        """Who waits for whom, while a phase takes long."""

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over."""

    def event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        """Something happened beside the numbers."""

    def answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        """Show responses to validation prompts."""

    def close(self) -> None: ...


def make_console(
    title: str, total_steps: int, *, stream: TextIO | None = None, live: bool | None = None
) -> StepConsole:
    """A live console when `stream` (standard output) is a terminal, or when `live` says so; otherwise plain lines."""
    stream = stream or sys.stdout
    state = ConsoleState(title=title, total_steps=total_steps)
    if stream.isatty() if live is None else live:
        return LiveConsole(state, Console(file=stream))
    return PlainConsole(state, stream)


class PlainConsole:
    """One line per step and per event, and after the first step how long the others will take."""

    def __init__(self, state: ConsoleState, stream: TextIO) -> None:
        self._state = state
        self._stream = stream

    def phase(self, name: str | None) -> None:
        self._state.phase(name)

    def wait(self, words: str) -> None:
        """No line: a log would be full of them. A stall ends the run, and its message says who waits."""

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._state.end_step(step, metrics)
        if "  " in (line := plain_line(self._state)):  # a validation before the first step may be a line of its own
            self._write(line)
        if (words := self._state.estimate()) is not None:
            self._write(words)

    def event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        self._state.event(kind, step, facts)
        if not any(name.startswith("val-core/") for name in facts):  # those are on the line of the step
            self._write(self._state.events[-1])

    def answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        for answer in answers:
            self._write(answer_text(step, answer))

    def close(self) -> None:
        self._stream.flush()

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class LiveConsole:
    """A picture that is redrawn in place. Log lines appear above it."""

    def __init__(self, state: ConsoleState, console: Console) -> None:
        self._state = state
        self._console = console
        self._lock = threading.Lock()
        self._handlers = _log_through(console)
        self._live = Live(
            get_renderable=self._draw, console=console, refresh_per_second=_REFRESHES_PER_SECOND, transient=False
        )
        self._live.start()

    def phase(self, name: str | None) -> None:
        with self._lock:
            self._state.phase(name)

    def wait(self, words: str) -> None:
        with self._lock:
            self._state.waits = words

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._state.end_step(step, metrics)
            words = self._state.estimate()
        if words is not None:
            self._console.print(words, markup=False, highlight=False)

    def event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        with self._lock:
            self._state.event(kind, step, facts)

    def answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        for answer in answers:
            self._console.print(answer_text(step, answer), markup=False, highlight=False)

    def close(self) -> None:
        with self._lock:
            self._state.phase(None)
        self._live.stop()
        for handler, stream in self._handlers:
            logging.root.removeHandler(handler)
            logging.root.addHandler(stream)

    def _draw(self) -> Any:
        with self._lock:
            return draw(self._state, time.monotonic(), self._console.width)


def _log_through(console: Console) -> list[tuple[logging.Handler, logging.Handler]]:
    """Let log lines for the terminal pass above the picture instead of through it; undone by `close`."""
    swapped: list[tuple[logging.Handler, logging.Handler]] = []
    for handler in list(logging.root.handlers):
        if type(handler) is logging.StreamHandler and handler.stream in (sys.stdout, sys.stderr):
            above = RichHandler(console=console, show_path=False, level=handler.level)
            logging.root.removeHandler(handler)
            logging.root.addHandler(above)
            swapped.append((above, handler))
    return swapped
