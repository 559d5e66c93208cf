"""`RunFolder`: what a run leaves on disk, apart from its checkpoints. The dashboard reads nothing else.

    config.yaml            the resolved configuration
    plan.json              placement, batch arithmetic, memory
    chat_template.json     with agents: what the chat template does with conversations
    metrics.jsonl          one flat JSON object per step, with `step`
    events.jsonl           validation, checkpoint, skipped step, failed rewards, resume
    rollouts/step_N.jsonl  prompt, response, scores, advantages, log-prob gap
    validation/step_N.jsonl
    timeline.jsonl         who worked on what, and when: one object per step
    record/step_N.safetensors   the batch of a step, for `dovetail replay` (`dovetail.trainer.recording`)
    eval.json              of `dovetail eval`: the scores, with the settings they were measured with
    draws.jsonl            what became of every draw (`dovetail.observability.ledger`)
    config_until_step_N.yaml    the configuration up to step N, where the run was continued with another one
    previous_N/            what an earlier run recorded here, when a new one starts from step 0; checkpoints of later
                           steps, when one continues from an earlier step
    run.lock               whose run it is, while it lasts (`dovetail.observability.run_lock`)
    now.json               the step and the phase the run is in, and at its end that it is finished; replaced each time

Lines are appended in one write; files appear only when complete. A process may be killed at any moment: the next start
removes a partial line and everything after the step it resumes from.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from dovetail.config.keys import is_secret_key
from dovetail.config.tree import leaves
from dovetail.observability.disk import DiskFullError, explaining_full_disk, flush_to_disk, replacing

logger = logging.getLogger(__name__)

METRICS, EVENTS, TIMELINE, NOW = "metrics.jsonl", "events.jsonl", "timeline.jsonl", "now.json"
DRAWS, RECORD, SCORES = "draws.jsonl", "record", "eval.json"
CONFIG, PLAN, TEMPLATE_AUDIT = "config.yaml", "plan.json", "chat_template.json"
_BEFORE, _UNTIL = "before_", "config_until_step_"
AnswerKind = Literal["rollouts", "validation"]
_STEP_FILE = re.compile(r"step_(\d+)\.")
_UNTIL_FILE = re.compile(rf"{_UNTIL}(\d+)\.yaml")


class RunFolder:
    """One writer per folder: the driver. Call `start` or `resume` before the first line."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def start(self, *checkpoints: Path) -> bool:
        """Begin a run from step 0; whether an earlier one was here. It is kept in `previous_N/`, not continued.

        `checkpoints` are files and folders of such a run beside those that are written here.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        names = (METRICS, EVENTS, TIMELINE, DRAWS, RECORD, SCORES, "rollouts", "validation")
        earlier = [*checkpoints, *(self.path / name for name in names if _holds_something(self.path / name))]
        if not earlier:
            self._drop_before()
            return False
        kept = self._free_folder()
        for path in (*earlier, *self.path.glob(f"{_UNTIL}*")):
            os.replace(path, kept / path.name)
        for name in (CONFIG, PLAN):
            if (file := self.path / f"{_BEFORE}{name}").exists():
                os.replace(file, kept / name)
        logger.warning("%s holds an earlier run; what it has left is now in %s", self.path, kept.name)
        return True

    def resume(self, step: int, *checkpoints: Path) -> None:
        """Continue after `step`: everything recorded beyond it is taken away, because it will happen again.

        `checkpoints` beyond it are kept in `previous_N/`: left here, they would be taken for the newest until this run
        has saved one. Where the configuration is another one, its differences are logged, and the earlier one is kept.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if checkpoints:
            kept, config = self._free_folder(), self.path / CONFIG
            before = self.path / f"{_BEFORE}{CONFIG}"
            if before.exists() or config.exists():
                write_text(kept / CONFIG, (before if before.exists() else config).read_text(encoding="utf-8"))
            for path in checkpoints:
                os.replace(path, kept / path.name)
            logger.warning("checkpoints after step %d, which an earlier attempt saved, are now in %s", step, kept)
        for name in (METRICS, EVENTS, TIMELINE, DRAWS):
            file = self.path / name
            if file.exists():
                kept = [line for line in read_json_lines(file) if line.get("step", 0) <= step]
                write_json_lines(file, kept)
                flush_to_disk(file)
        self._remove_files_after(step)
        changed = self._changed_settings()
        if changed:
            words = "".join(f"\n  {key}: {old} -> {new}" for key, (old, new) in changed.items())
            logger.warning("step %d is continued with other settings than before:%s", step, words)
            os.replace(self.path / f"{_BEFORE}{CONFIG}", self._free_file(f"{_UNTIL}{step}", ".yaml"))
        self._drop_before()
        self.log_event("resume", step, **({"changed": changed} if changed else {}))

    def write_config(self, values: Mapping[str, Any]) -> None:
        """The resolved configuration as YAML; give `config.model_dump(mode="json")`."""
        from dovetail.config.yaml_text import dump_yaml

        self._write_anew(CONFIG, dump_yaml(values))

    def config_of(self, step: int) -> Path:
        """The configuration that the run had when it saved the checkpoint of `step`."""
        ends = [int(match[1]) for file in self.path.iterdir() if (match := _UNTIL_FILE.fullmatch(file.name))]
        if later := [end for end in ends if end >= step]:
            return self.path / f"{_UNTIL}{min(later)}.yaml"
        # An attempt that never came to its first step, or one that is starting, has written the newest one.
        before = self.path / f"{_BEFORE}{CONFIG}"
        return before if before.exists() else self.path / CONFIG

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """The plan as JSON; give `plan.to_dict()`."""
        self._write_anew(PLAN, json.dumps(_finite(dict(plan)), indent=1) + "\n")

    def write_template_audit(self, audit: Mapping[str, Any]) -> None:
        """What the chat template does with conversations, of a run with agents."""
        self._write_anew(TEMPLATE_AUDIT, json.dumps(dict(audit), indent=1, ensure_ascii=False) + "\n")

    def log_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line. NaN and infinity become null: JSON has no words for them."""
        append_json_lines(self.path / METRICS, [{"step": step, **metrics}])

    def log_event(self, kind: str, step: int, **facts: Any) -> None:
        """Append something that happened: `validation`, `checkpoint`, `skipped_step`, `resume`."""
        event = {"time": round(time.time(), 3), "kind": kind, "step": step, **facts}
        append_json_lines(self.path / EVENTS, [event])

    def log_timeline(self, step: int, spans: Iterable[Sequence[Any]]) -> None:
        """Append who worked on what in a step: `(worker, phase, start, end, memory in GiB or None)`.

        Times come in seconds since the epoch and are written relative to the first of them.
        """
        ordered = sorted(spans, key=lambda span: span[2])
        if not ordered:
            return
        first = ordered[0][2]
        rows = [
            [worker, phase, round(start - first, 4), round(end - first, 4), None if gib is None else round(gib, 3)]
            for worker, phase, start, end, gib in ordered
        ]
        append_json_lines(self.path / TIMELINE, [{"step": step, "time": round(first, 3), "spans": rows}])

    def write_now(self, **facts: Any) -> None:
        """What the run is doing at this moment, and which process says so. A reader may find it gone stale."""
        facts |= {"time": round(time.time(), 3), "pid": os.getpid(), "host": socket.gethostname()}
        write_text(self.path / NOW, _line(facts))

    def write_answers(self, step: int, rows: Iterable[Mapping[str, Any]], kind: AnswerKind = "rollouts") -> Path:
        """Write the responses of a step, one JSON object per line. The file appears only when complete."""
        file = self.path / kind / f"step_{step}.jsonl"
        write_json_lines(file, rows)
        return file

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines."""
        return list(read_json_lines(self.path / METRICS))

    def read_events(self) -> list[dict[str, Any]]:
        return list(read_json_lines(self.path / EVENTS))

    def _write_anew(self, name: str, text: str) -> None:
        """Replace a file; the one before it is kept beside it until `start` or `resume`.

        What is kept there already stays: the attempt after it never came to its first step.
        """
        file, before = self.path / name, self.path / f"{_BEFORE}{name}"
        if file.exists() and not before.exists():
            # A copy: a run that is killed here has its configuration still.
            write_text(before, file.read_text(encoding="utf-8"))
        write_text(file, text)

    def _drop_before(self) -> None:
        for name in (CONFIG, PLAN):
            (self.path / f"{_BEFORE}{name}").unlink(missing_ok=True)

    def _changed_settings(self) -> dict[str, tuple[Any, Any]]:
        """Keys whose value is another one than in the attempt before, with both; secrets are not shown."""
        files = [self.path / f"{_BEFORE}{CONFIG}", self.path / CONFIG]
        if not all(file.exists() for file in files):
            return {}
        from dovetail.config.yaml_text import load_yaml

        old, new = (dict(leaves(load_yaml(file.read_text(encoding="utf-8")) or {})) for file in files)
        changed = {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}
        return {key: ("hidden", "hidden") if is_secret_key(key) else values for key, values in changed.items()}

    def _free_file(self, stem: str, ending: str) -> Path:
        names = (f"{stem}{ending}", *(f"{stem}_{number}{ending}" for number in range(2, 1000)))
        return next(self.path / name for name in names if not (self.path / name).exists())

    def _free_folder(self) -> Path:
        for number in itertools.count(1):
            folder = self.path / f"previous_{number}"
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
        raise AssertionError("numbers do not end")

    def _remove_files_after(self, step: int) -> None:
        for kind in ("rollouts", "validation", RECORD):
            for file in (self.path / kind).glob("step_*"):
                match = _STEP_FILE.match(file.name)
                if match and int(match.group(1)) > step:
                    file.unlink()


def _holds_something(path: Path) -> bool:
    if path.is_dir():
        return any(path.iterdir())
    return path.exists() and path.stat().st_size > 0


def read_json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Every complete line of a file that may still be written to. A partial line at the end is skipped."""
    if not file.exists():
        return
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError:
            logger.warning("%s:%d is not a complete line of JSON and is skipped", file, number)


def write_json_lines(file: Path, rows: Iterable[Mapping[str, Any]], *, advice: str = "") -> None:
    """Replace a file by one JSON object per line. It appears when the last row is there.

    `advice` is for a full disk, where the file is not in the run folder.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(_line(row) for row in rows), advice=advice)


def write_text(file: Path, text: str, *, advice: str = "") -> None:
    """Replace a file so that a reader sees the old one or the complete new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as partial, explaining_full_disk(file, advice=advice):
        # What a model or a tool wrote may hold half a character (`\ud800` in JSON): that must not end a run.
        partial.write_text(text, encoding="utf-8", errors="replace")


def append_json_lines(file: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """One write call for all lines, so that a kill leaves them or nothing; only a full disk leaves a part."""
    line = "".join(_line(entry) for entry in entries).encode(errors="replace")
    handle = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line  # A partial line is there: let it be one bad line, not two.
        with explaining_full_disk(file):
            written = os.write(handle, line)
        if written != len(line):
            raise DiskFullError(file, needed=len(line))
    finally:
        os.close(handle)


def _line(entry: Mapping[str, Any]) -> str:
    """Arrays of numbers come last. They are as long as an answer, and Python would look at each number by itself."""
    arrays = {name: value for name, value in entry.items() if _is_numbers(value)}
    rest = {name: value for name, value in entry.items() if name not in arrays}
    line = json.dumps(_finite(rest), ensure_ascii=False, allow_nan=False)[:-1]
    for name, array in arrays.items():
        line += f"{', ' if len(line) > 1 else ''}{json.dumps(str(name))}: {_numbers(array)}"
    return line + "}\n"


def _is_numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim >= 1 and value.dtype.kind in "iuf"


def _numbers(array: np.ndarray) -> str:
    return orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY).decode()


def _finite(value: Any) -> Any:
    """Plain JSON values. Numbers of numpy and torch become Python's."""
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_finite(entry) for entry in value]
    if hasattr(value, "tolist"):
        return _finite(value.tolist())
    return str(value)
