"""`events.jsonl` and `now.json`: what happened beside the numbers, and what is happening."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Literal

from dovetail.dashboard.growing_file import GrowingFile

State = Literal["created", "running", "finished", "stopped"]
_MOST_EVENTS = 20_000
_USUAL = ("validation", "checkpoint", "reward_failed")
# Without word of the process itself: a run that has written nothing for this long is taken to have ended.
_QUIET_S = 30 * 60


class EventLog:
    """Call `refresh` before reading."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self.events: list[dict[str, Any]] = []

    def refresh(self) -> None:
        if self._file.was_replaced():
            self.events = []
        for line in self._file.new_lines():
            if line.value is not None and isinstance(line.value.get("step"), int):
                self.events.append(line.value)
        del self.events[:-_MOST_EVENTS]

    def marks(self, most: int = 400) -> list[dict[str, Any]]:
        """Kind, step and a few words of each event; of very many, evenly spaced ones and every unusual one."""
        is_usual = [event.get("kind") in _USUAL for event in self.events]
        stride = -(-sum(is_usual) // most) or 1
        kept, seen = [], 0
        for event, usual in zip(self.events, is_usual, strict=True):
            if not usual or seen % stride == 0:
                kept.append(_mark(event))
            seen += usual
        return kept[-2 * most :]


def _mark(event: dict[str, Any]) -> dict[str, Any]:
    # `best@4`, not verl's `best@4/mean` beside it.
    named = {
        name: value for name, value in event.items() if name.startswith("val-core/") and "@" in name.rpartition("/")[2]
    }
    facts = [f"{name} {value:.4g}" for name, value in named.items() if _number(value)]
    return {"kind": str(event.get("kind", "event")), "step": event["step"], "text": ", ".join(facts[:4])}


def _number(value: Any) -> bool:
    return isinstance(value, (int, float))


def read_now(folder: Path) -> dict[str, Any]:
    """What the run last said it is doing; empty when it never did."""
    try:
        value = json.loads((folder / "now.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def run_state(now: dict[str, Any], last_step: int | None, total_steps: int | None, changed: float) -> State:
    """Whether a run goes on: by its own last word, by its steps, by its process, and else by `changed`, when its folder
    was last written to."""
    if last_step is None and not now:
        return "created"
    if now.get("finished") is True:
        return "finished"
    if last_step is not None and total_steps is not None and last_step >= total_steps and now.get("phase") is None:
        return "finished"
    if now.get("host") == socket.gethostname() and isinstance(now.get("pid"), int) and now["pid"] > 0:
        return "running" if _is_alive(now["pid"]) else "stopped"
    return "running" if time.time() - changed < _QUIET_S else "stopped"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
