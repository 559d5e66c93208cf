"""Run every path of `dovetail.doctor.paths` in a process of its own, each with a deadline; one result for each.

A path that hangs is killed with all it started and named with the stage it was at; the stacks of its threads are kept.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dovetail.config.installed import core_versions
from dovetail.doctor.paths import PATHS
from dovetail.doctor.site import Site

_LAST_WORDS_S = 2.0
_TAIL = 40


@dataclass(frozen=True)
class PathResult:
    """`verdict`: ok, FAILED, hung, refused (this version cannot do it), not here (a library or a device is missing)."""

    name: str
    shows: str
    verdict: str
    seen: str
    seconds: float
    log: str = ""

    @property
    def failed(self) -> bool:
        return self.verdict in ("FAILED", "hung")


def select(names: Sequence[str]) -> list[str]:
    """The paths whose names begin with one of `names`; all of them for none. Unknown names are an error."""
    known = [path.name for path in PATHS]
    for name in names:
        if not any(path.startswith(name) for path in known):
            raise ValueError(f"there is no path {name!r}; the paths are: {'; '.join(known)}.")
    return [path for path in known if not names or path.startswith(tuple(names))]


def run_paths(site: Site, names: Sequence[str], *, timeout_s: float) -> Iterator[PathResult]:
    """One after the other: each has all devices for itself."""
    for name in names:
        yield _run(site, name, timeout_s)


def write_report(file: Path, site: Site, machine: Sequence[tuple[str, str]], results: Sequence[PathResult]) -> None:
    """What to attach to a bug report: the machine, the versions, every verdict, and the end of every failed log."""

    report: dict[str, Any] = {
        "machine": dict(machine),
        "versions": {part.name: part.version for part in core_versions()},
        "site": site.to_json(),
        "paths": [asdict(result) for result in results],
    }
    file.write_text(json.dumps(report, indent=1) + "\n")


def _run(site: Site, name: str, timeout_s: float) -> PathResult:
    path = next(path for path in PATHS if path.name == name)
    shows = path.shows
    if missing := path.missing(site):
        return PathResult(name, shows, "not here", missing, 0.0)
    stem = site.folder / f"path-{name.replace(', ', '-').replace(' ', '-')}"
    site_file, result_file, log = stem.with_suffix(".site"), stem.with_suffix(".json"), stem.with_suffix(".log")
    site_file.write_text(json.dumps(site.to_json()))
    command = [sys.executable, "-m", "dovetail.doctor.paths", name, str(site_file), str(result_file)]
    begin = time.monotonic()
    with log.open("w") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        child.wait(timeout_s)
        hung = False
    except subprocess.TimeoutExpired:
        hung = True
        os.kill(child.pid, signal.SIGUSR1)  # its threads' stacks
        time.sleep(_LAST_WORDS_S)
    finally:
        _kill_group(child)
    seconds = time.monotonic() - begin
    stages = _text(result_file.with_suffix(".stage")).splitlines()
    if hung:
        at = stages[-1] if stages else "start"
        seen = f"no result within {timeout_s:.0f} s, waiting at: {at}"
        return PathResult(name, shows, "hung", seen, seconds, _text(result_file.with_suffix(".stacks")) + _tail(log))
    if not result_file.exists():
        at = stages[-1] if stages else "start"
        seen = f"the process ended with exit code {child.returncode} at: {at}"
        return PathResult(name, shows, "FAILED", seen, seconds, _tail(log))
    report = json.loads(result_file.read_text())
    detail = report.get("traceback", "") + _tail(log) if report["verdict"] == "FAILED" else ""
    return PathResult(name, shows, report["verdict"], report["seen"], seconds, detail)


def _kill_group(child: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _tail(log: Path) -> str:
    return "\n".join(_text(log).splitlines()[-_TAIL:])
