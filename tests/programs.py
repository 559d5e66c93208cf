"""Run `dovetail ...` and `python ...` as programs of their own that start at once, for tests.

The process comes from the fork server of `tests.ranks`, which has torch and the models imported: importing them is most
of what a short command costs. Everything else is as in a new interpreter: folder, environment, arguments, output, exit.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ranks import _CONTEXT

ROOT = Path(__file__).parents[1]
ENVIRONMENT = dict(os.environ)
"""As it was before any test."""


def run_program(
    words: Sequence[str], *, cwd: Path = ROOT, env: Mapping[str, str] = ENVIRONMENT, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """`dovetail` with its arguments, `python FILE ...` or `python -c CODE`; all it wrote is in `stdout`."""
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        output = Path(folder) / "output"
        process = _CONTEXT.Process(target=_main, args=(list(words), str(cwd), dict(env), str(output)))
        code = exit_code(process, timeout, lambda: f"{' '.join(words)}\n{output.read_text()[-3000:]}")
        return subprocess.CompletedProcess(list(words), code, output.read_text(errors="replace"), "")


def exit_code(process: Any, timeout: float, what: Callable[[], str]) -> int:
    """Of a process that is started here; one that does not end is killed and named."""
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"no end after {timeout:.0f} s: {what()}")
    return process.exitcode


@contextmanager
def holding(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder of a run until its input ends."""
    command = [sys.executable, "-c", _HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


_HOLD = """
import sys
from dovetail.observability.run_lock import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def _main(words: list[str], cwd: str, env: dict[str, str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # The child of a fork server has our folder and our arguments; a program has its own.
    sys.path[:0] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    program, *sys.argv = words
    try:
        if Path(program).name == "dovetail":
            from dovetail.cli.main import main

            sys.argv.insert(0, program)
            sys.exit(main(words[1:]))
        elif sys.argv[0] == "-c":
            code = sys.argv.pop(1)
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
