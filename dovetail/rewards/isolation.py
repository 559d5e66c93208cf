"""What a program of a model can reach on this machine. Found out once, by trying; runs no answer itself."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Imported, not run as a script: that would compile it for every program.
_LAUNCH = (
    f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import program_launcher; sys.path.pop(); "
    "sys.exit(program_launcher.main())"
)
_PROBE_SECONDS = 30
_MAX_PROCESSES = 64


@dataclass(frozen=True)
class Isolation:
    """`is_sandbox`: own files, no network, limited processes. Otherwise `missing` says why not."""

    is_sandbox: bool
    ends_orphans: bool
    missing: str = ""

    def describe(self) -> str:
        """One line for the console."""
        if self.is_sandbox:
            return (
                "programs run in a sandbox: they see the interpreter and an empty folder, no network, at most "
                f"{_MAX_PROCESSES} processes, and end with everything they started."
            )
        orphans = "end with everything they started" if self.ends_orphans else "may leave processes behind"
        return (
            f"programs are NOT sandboxed on this machine ({self.missing}): they can read your files and use the "
            f"network. Time, memory and output are limited; programs {orphans}."
        )

    def command(self, *, program: str, root: str, timeout: float, memory: int, output: int, report: int) -> list[str]:
        """The command line that runs a program this way."""
        settings = {
            "program": program,
            "root": root,
            "timeout": timeout,
            "memory": memory,
            "output": output,
            "report": report,
            "isolate": "yes" if self.is_sandbox else "no",
            "readable": os.pathsep.join(_interpreter_folders()),
            "processes": _MAX_PROCESSES,
        }
        words = [str(word) for setting in settings.items() for word in setting]
        return [sys.executable, "-I", "-c", _LAUNCH, *words]


@functools.cache
def detect_isolation() -> Isolation:
    """Tries a program in namespaces of its own; what the kernel, a container or AppArmor forbids shows here."""
    if sys.platform != "linux":
        return Isolation(False, False, f"namespaces are Linux's; this is {sys.platform}")
    problem = _try_namespaces(Isolation(True, True))
    return Isolation(True, True) if problem is None else Isolation(False, True, problem)


def _try_namespaces(isolation: Isolation) -> str | None:
    """None when a program ran and could not see this file; otherwise why not."""
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        program, work = os.path.join(folder, "program.py"), os.path.join(folder, "work")
        os.mkdir(work)
        with open(program, "w") as file:
            file.write(f"import os, json\nprint(os.path.exists({program!r}))")
        ended, report = os.pipe()
        command = isolation.command(
            program=program, root=work, timeout=_PROBE_SECONDS, memory=1 << 30, output=1 << 20, report=report
        )
        with open(ended, "rb") as reports:
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(report,),
                    timeout=2 * _PROBE_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return "a first program in namespaces of its own did not end"
            finally:
                os.close(report)
            said = reports.read().decode()
    if said == "exit 0" and done.stdout.strip() == "False":
        return None
    return said.removeprefix("unavailable ").strip() or done.stderr.strip()[-200:] or "it hid no files"


@functools.cache
def _interpreter_folders() -> list[str]:
    """What the interpreter needs to run and import its packages, outermost first. Not the user's home."""
    wanted = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable))]
    folders = sorted({path for folder in wanted for path in (folder, os.path.realpath(folder)) if folder}, key=len)
    home = os.path.realpath(os.path.expanduser("~"))
    hidden = {"/", home, *map(str, Path(home).parents)}
    kept: list[str] = []
    for folder in folders:
        if folder not in hidden and not any(folder == outer or folder.startswith(outer + "/") for outer in kept):
            kept.append(folder)
    return kept
