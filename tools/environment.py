"""Make a Python environment, or add to one: quietly, from wheels only, with uv where it is there and pip where not.

  python tools/environment.py .venv 'PyTorch: torch==2.13.0' 'dovetail: -e .[demo]'

Each step is a title and what `pip install` is given. What the installer prints goes to setup.log in the folder and is
shown only when a step fails. No step builds a package from source, so no compiler is needed; a step that would is an
error. Runs on the standard library alone, and on an older Python only to say that it is too old.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

OLDEST = (3, 11)
# Packages that are published as source only and hold no native code. There is none today.
PURE_PYTHON_SOURCES: tuple[str, ...] = ()
# The project itself, whose editable wheel holds a path and no code.
BUILT_HERE = {"dovetail", *PURE_PYTHON_SOURCES}
# What pip can be told about where packages come from, and uv does not read.
PIP_SOURCES = {
    "index-url", "extra-index-url", "find-links", "no-index", "cert", "client-cert", "proxy", "trusted-host",
    "constraint",
}  # fmt: skip
_LINES_OF_A_FAILURE = 30
_SECONDS_BETWEEN_LINES = 20
_ACTIVITY = re.compile(
    r"^\s*(Downloading|Installing collected packages|Prepared|Resolved|Building|Installed)\b(.*)", re.M
)
# pip: `Building wheel for NAME (pyproject.toml)`; uv: `Building NAME==1.0`, `Built NAME @ file:///...`.
_BUILT = re.compile(r"^\s*Building (?:wheel|editable) for ([\w.-]+)|^\s*(?:Building|Built) ([\w.-]+)(?:==| @ )", re.M)
_INSTALLED = re.compile(r"^Successfully installed (.*)$|^Installed (\d+) packages?", re.M)


class SetupError(Exception):
    """What a user has to know; nothing else is shown."""


def main(arguments: list[str]) -> int:
    folder, steps = Path(arguments[0]), [step.split(": ", 1) for step in arguments[1:]]
    try:
        if sys.version_info < OLDEST:
            raise SetupError(
                f"dovetail needs Python {OLDEST[0]}.{OLDEST[1]} or newer, and {sys.executable} is "
                f"{sys.version.split()[0]}. Name another one: make PYTHON=python3.12 ..."
            )
        set_up(folder, [(title, shlex.split(wish)) for title, wish in steps])
    except SetupError as error:
        say(f"{error}")
        return 1
    return 0


def set_up(folder: Path, steps: list[tuple[str, list[str]]]) -> None:
    """Make `folder` an environment if it is none, then install step by step."""
    began = time.monotonic()
    uv, why_pip = choose_uv()
    log = folder / "setup.log"
    say(f"Setting up {folder} with {'uv' if uv else 'pip'}{why_pip}. Everything it prints: {log}")
    python = folder / "bin" / "python"
    if not python.exists():
        folder.mkdir(parents=True, exist_ok=True)
        make = [uv, "venv", "--seed", "--allow-existing", "--python", sys.executable, str(folder)]
        run_step("new environment", make if uv else [sys.executable, "-m", "venv", str(folder)], folder, log)
    for number, (title, wish) in enumerate(steps, start=1):
        install = [uv, "pip", "install", "--python", str(python), "--compile-bytecode"] if uv else []
        install = install or [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        printed = run_step(f"[{number}/{len(steps)}] {title}", [*install, *wheels_only(), *wish], folder, log)
        refuse_built(printed, title)
    say(f"{folder} is ready: {_megabytes(folder)} in {time.monotonic() - began:.0f} s.")


def wheels_only() -> list[str]:
    """What keeps the installer from building: each exception is named, and is pure Python."""
    exceptions = [f"--no-binary={name}" for name in PURE_PYTHON_SOURCES]
    return ["--only-binary=:all:", *exceptions]


def refuse_built(printed: str, title: str) -> None:
    """The second look: whatever let it happen, nothing may have been built but what is named above."""
    names = {"".join(groups).lower().replace("_", "-") for groups in _BUILT.findall(printed)}
    built = names - BUILT_HERE
    if built:
        raise SetupError(
            f"{title}: {', '.join(sorted(built))} was built from source, which needs a compiler on other machines. "
            "Pin a version that has a wheel; a pure-Python package goes into PURE_PYTHON_SOURCES."
        )


def choose_uv() -> tuple[str | None, str]:
    """uv's path, or None and why not. `UV=` (empty) asks for pip."""
    uv = shutil.which(os.environ.get("UV", "uv") or "no uv wanted")
    if uv is None:
        return None, ""
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    names = {line.split("=")[0].rpartition(".")[2] for line in settings.stdout.splitlines()}
    own = sorted(names & PIP_SOURCES)
    if own:
        return None, f" (uv is here, but does not read what pip was told: {', '.join(own)})"
    return uv, ""


def run_step(title: str, command: list[str], folder: Path, log: Path) -> str:
    """Run one command, show that it moves and what it brought; return what it printed."""
    began, before = time.monotonic(), _bytes(folder)
    start = log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        output.write(f"\n$ {shlex.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            _watch(process, title, log, start, began)
        except BaseException:
            process.terminate()
            raise
    printed = log.read_bytes()[start:].decode(errors="replace")
    seconds = time.monotonic() - began
    if process.returncode != 0:
        raise SetupError(_failure(title, printed, log))
    packages = _packages(printed)
    brought = f"{packages} packages, {(_bytes(folder) - before) / 1e6:.0f} MB, " if packages else ""
    _show(f"{title}: {brought}{seconds:.0f} s", last=True)
    return printed


def _watch(process: subprocess.Popen[bytes], title: str, log: Path, start: int, began: float) -> None:
    """A terminal gets a line that changes twice a second; a file gets one now and then."""
    terminal, said = sys.stdout.isatty(), time.monotonic()
    while True:
        try:
            process.wait(0.5 if terminal else 1.0)
            return
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if terminal or now - said > _SECONDS_BETWEEN_LINES:
            said = now
            _show(
                f"{title}: {now - began:.0f} s{_doing(log.read_bytes()[start:].decode(errors='replace'))}", last=False
            )


def _doing(printed: str) -> str:
    """`, downloading torch-2.13.0 (104.2 MB)`: the last thing that the installer said it does."""
    found = _ACTIVITY.findall(printed)
    if not found:
        return ""
    verb, rest = found[-1]
    if verb == "Installing collected packages":
        return f", installing {rest.count(',') + 1} packages"
    if verb == "Installed":  # by uv, which compiles afterwards
        return ", compiling their bytecode"
    return f", {verb.lower()} {re.sub(r'-(?:cp|py|manylinux|macosx)[^ ]*', '', rest.strip())}"


def _packages(printed: str) -> int:
    return sum(len(names.split()) if names else int(count) for names, count in _INSTALLED.findall(printed))


def _failure(title: str, printed: str, log: Path) -> str:
    """The installer's last words, without its warnings, and the fixes of what goes wrong most."""
    lines = [line for line in printed.splitlines() if line.strip() and not line.lstrip().startswith("WARNING")]
    shown = "\n".join(f"    {line}" for line in lines[-_LINES_OF_A_FAILURE:])
    hint = ""
    if "No matching distribution" in printed or "no usable wheels" in printed or "no wheels" in printed:
        hint = (
            f"\nOnly wheels are installed, so that no compiler is needed, and one is missing for Python "
            f"{sys.version_info[0]}.{sys.version_info[1]} on {sys.platform}. Another Python may have it: "
            "make PYTHON=python3.12 ..."
        )
    return f"{title} failed; its last lines (all of them: {log}):\n{shown}{hint}"


def _bytes(folder: Path) -> int:
    sizes = (os.lstat(os.path.join(place, name)).st_size for place, _, names in os.walk(folder) for name in names)
    return sum(sizes)


def _megabytes(folder: Path) -> str:
    return f"{_bytes(folder) / 1e6:,.0f} MB"


def _show(line: str, *, last: bool) -> None:
    if not sys.stdout.isatty():
        say(f"  {line}")
        return
    width = shutil.get_terminal_size().columns - 1
    sys.stdout.write("\r\x1b[K" + f"  {line}"[:width] + ("\n" if last else ""))
    sys.stdout.flush()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
