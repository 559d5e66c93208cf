"""Run the paths of `dovetail.doctor.paths` in another process, each with a deadline; one result for each.

Paths share the process, whose imports take longer than most of them, until one fails; the next one gets a new process.
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
from dovetail.doctor.paths import PATHS, DoctorPath, file_name
from dovetail.doctor.site import Site
from dovetail.observability.run_folder import write_text

_LAST_WORDS_S = 2.0
_END_S = 30.0
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
    paths = [next(path for path in PATHS if path.name == name) for name in names]
    missing = {path.name: path.missing(site) for path in paths}
    child: _Child | None = None
    try:
        for number, path in enumerate(paths):
            if missing[path.name]:
                yield PathResult(path.name, path.shows, "not here", missing[path.name], 0.0)
                continue
            if child is None:
                child = _Child(site, [other.name for other in paths[number:] if not missing[other.name]])
            result = child.result_of(path, timeout_s)
            if result.failed:
                child.kill()
                child = None
            yield result
    finally:
        if child is not None:
            child.end()


def write_report(file: Path, site: Site, machine: Sequence[tuple[str, str]], results: Sequence[PathResult]) -> None:
    """What to attach to a bug report: the machine, the versions, every verdict, and the end of every failed log."""
    report: dict[str, Any] = {
        "machine": dict(machine),
        "versions": {part.name: part.version for part in core_versions()},
        "site": site.to_json(),
        "paths": [asdict(result) for result in results],
    }
    write_text(file, json.dumps(report, indent=1) + "\n")


class _Child:
    """A process that runs paths in their order and ends after the first that fails."""

    def __init__(self, site: Site, names: Sequence[str]) -> None:
        site_file = site.folder / "site.json"
        site_file.write_text(json.dumps(site.to_json()))
        self._folder = site.folder
        for name in names:  # of an earlier call in the same folder
            for suffix in (".json", ".stage"):
                (site.folder / f"{file_name(name)}{suffix}").unlink(missing_ok=True)
        self._log = site.folder / f"from-{file_name(names[0])}.log"
        self._begin = time.monotonic()
        command = [sys.executable, "-m", "dovetail.doctor.paths", str(site_file), *names]
        with self._log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

    def result_of(self, path: DoctorPath, timeout_s: float) -> PathResult:
        """Wait for the path that is next. Its time begins with the process, or with the result before."""
        file = self._folder / f"{file_name(path.name)}.json"
        deadline = self._begin + timeout_s
        while not (done := file.exists()) and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        done = done or file.exists()  # written between the question and the end of the process
        hung = not done and self._process.poll() is None
        if hung:
            os.kill(self._process.pid, signal.SIGUSR1)  # its threads' stacks
            time.sleep(_LAST_WORDS_S)
        seconds, self._begin = time.monotonic() - self._begin, time.monotonic()
        if done:
            report = json.loads(file.read_text())
            detail = report.get("traceback", "") + _tail(self._log) if report["verdict"] == "FAILED" else ""
            return PathResult(path.name, path.shows, report["verdict"], report["seen"], seconds, detail)
        stages = _text(file.with_suffix(".stage")).splitlines()
        at = stages[-1] if stages else "start"
        if hung:
            seen = f"no result within {timeout_s:.0f} s, waiting at: {at}"
            stacks = _text(file.with_suffix(".stacks"))
            return PathResult(path.name, path.shows, "hung", seen, seconds, stacks + _tail(self._log))
        seen = f"the process ended with exit code {self._process.returncode} at: {at}"
        return PathResult(path.name, path.shows, "FAILED", seen, seconds, _tail(self._log))

    def end(self) -> None:
        """After its last path it leaves Ray and ends by itself."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self.kill()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _tail(log: Path) -> str:
    return "\n".join(_text(log).splitlines()[-_TAIL:])
