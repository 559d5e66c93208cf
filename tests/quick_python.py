"""A Python that has its modules imported already, for programs that others start.

Ray, vLLM and a client of SGLang start programs by the path of a Python and its arguments, and each imports for 7 to 20
CPU seconds. `quick_python` gives a path to put there. The program behind it hands its arguments, environment, folder
and open files to a server that has the modules imported; a fork of that server becomes the program that was asked for.
The program lives as long as the fork, and the fork is killed when the program ends.

Standard library only: another Python, such as that of SGLang, runs this file too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LENGTH = 8
"""Bytes of a message's length."""
_MOST_FILES = 64


@dataclass(frozen=True)
class QuickPython:
    """`words` begin a command line; `path` is the same as an executable file."""

    words: list[str]
    path: str

    @property
    def _folder(self) -> Path:
        return Path(self.path).parent

    def forked_for(self, pid: int) -> int:
        """The process that works for the program `pid`. It has a process group of its own."""
        file, deadline = self._folder / f"{pid}.pid", time.monotonic() + 240
        while not file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no process was forked for {pid}")
            time.sleep(0.01)
        return int(file.read_text())


@functools.cache
def quick_python(*preload: str) -> QuickPython:
    """From the fork server of `tests.ranks`, which has torch and the models imported; `preload` are further modules.

    With them, also the processes that its programs start with `multiprocessing` come from there.
    """
    import atexit
    import shutil

    from tests.ranks import _CONTEXT

    quick, listener = _listen(sys.executable)
    process = _CONTEXT.Process(target=_serve, args=(listener, os.getpid(), preload, quick.path if preload else None))
    process.start()
    atexit.register(process.kill)
    atexit.register(shutil.rmtree, Path(quick.path).parent)
    return quick


@functools.cache
def quick_python_of(python: str, environment: tuple[tuple[str, str], ...], *preload: str) -> QuickPython:
    """From a server that another Python runs, in this environment: one of another set of packages."""
    import atexit
    import shutil
    import subprocess

    quick, listener = _listen(sys.executable)
    words = [python, "-P", os.path.abspath(__file__), "--serve", str(listener.fileno()), str(os.getpid()), *preload]
    env = {**os.environ, **dict(environment)}
    process = subprocess.Popen(words, pass_fds=[listener.fileno()], env=env, stdin=subprocess.DEVNULL)
    atexit.register(process.kill)
    atexit.register(shutil.rmtree, Path(quick.path).parent)
    return quick


def _listen(python: str) -> tuple[QuickPython, socket.socket]:
    folder = tempfile.mkdtemp(prefix="python-")
    address = os.path.join(folder, "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    words = [python, "-S", "-E", os.path.abspath(__file__), address]
    script = Path(folder) / "python"
    script.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
    script.chmod(0o755)
    return QuickPython(words, str(script)), listener


def _serve(listener: socket.socket, owner: int, preload: tuple[str, ...], executable: str | None) -> None:
    """One process for each connection, until the process of the tests is gone, killed or not."""
    import gc
    import importlib
    import multiprocessing

    for name in preload:
        importlib.import_module(name)
    gc.freeze()
    if executable is not None:
        multiprocessing.set_executable(executable)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while _exists(owner):
        if not select.select([listener], [], [], 1.0)[0]:
            continue
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _become(connection)
        connection.close()


def _exists(pid: int) -> bool:
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def _become(connection: socket.socket) -> None:
    import threading

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # As Ray's own workers: when one ends, Ray kills its process group, which must not be that of the tests.
    os.setpgid(0, 0)
    length, sent, _, _ = socket.recv_fds(connection, _LENGTH, _MOST_FILES)
    with connection.makefile("rb") as file:
        words, environment, folder, numbers = json.loads(file.read(int.from_bytes(length, "big")))
    _note_pid(connection)
    connection = _with_files(connection, dict(zip(numbers, sent, strict=True)))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))

    def end_with_the_program() -> None:
        connection.recv(1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=end_with_the_program, daemon=True).start()
    _run(words)
    sys.exit()


def _note_pid(connection: socket.socket) -> None:
    """For `forked_for`, under the name of the program that asked."""
    asked_by, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    file = Path(connection.getsockname()).with_name(f"{asked_by}.pid")
    file.with_suffix(".part").write_text(str(os.getpid()))
    file.with_suffix(".part").rename(file)


def _with_files(connection: socket.socket, files: dict[int, int]) -> socket.socket:
    """The open files of the program under the numbers they have there; the connection under one that is free."""
    import fcntl

    above = max([2, *files, *files.values()]) + 1
    moved = socket.socket(fileno=fcntl.fcntl(connection.detach(), fcntl.F_DUPFD_CLOEXEC, above))
    high = {number: fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, above) for number, source in files.items()}
    for source in files.values():
        os.close(source)
    for number, source in high.items():
        os.dup2(source, number)
        os.close(source)
    return moved


def _run(words: list[str]) -> None:
    """As Python reads its command line: options without a value, then a module, a text or a file."""
    import runpy

    while words[0] in ("-u", "-P", "-B", "-E", "-s"):
        words = words[1:]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _stand_in(address: str, words: list[str]) -> None:
    """The program that others start: asks for a fork and ends with it, or with whoever started it."""
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        files = list(_open_files(connection.fileno()))
        message = json.dumps([words, dict(os.environ), os.getcwd(), files]).encode()
        socket.send_fds(connection, [len(message).to_bytes(_LENGTH, "big")], files)
        connection.sendall(message)
        while os.getppid() == parent and not select.select([connection], [], [], 1.0)[0]:
            pass


def _open_files(but: int) -> Iterator[int]:
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        with contextlib.suppress(OSError):  # the folder that was just listed
            os.fstat(number)
            if number != but:
                yield number


if __name__ == "__main__" and sys.argv[1] == "--serve":
    _serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), tuple(sys.argv[4:]), None)
elif __name__ == "__main__":
    _stand_in(sys.argv[1], sys.argv[2:])
