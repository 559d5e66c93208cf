"""Ray workers that start at once, for tests.

A worker that trains costs nine CPU seconds before its first call, seven of them imports. Ray lets us choose the program
that it starts as a worker (`py_executable` in `runtime_env`). Ours sends its arguments, environment, folder and output
to a process of the fork server of `tests.ranks`, which has torch and the models imported; a fork of that becomes the
worker. The program lives as long as the worker, and the worker is killed when the program ends.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from typing import Any

_LENGTH = 8
"""Bytes of a message's length."""


@functools.cache
def quick_workers() -> dict[str, Any]:
    """A `runtime_env` with which a Ray of this process, or of one that it starts, has such workers."""
    from tests.ranks import _CONTEXT

    folder = tempfile.mkdtemp(prefix="workers-")
    address = os.path.join(folder, "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    process = _CONTEXT.Process(target=_serve, args=(listener, os.getpid()))
    process.start()
    atexit.register(process.kill)
    atexit.register(shutil.rmtree, folder)
    return {"py_executable": f"{sys.executable} -S -E {os.path.abspath(__file__)} {address}"}


def _serve(listener: socket.socket, owner: int) -> None:
    """One worker for each connection, until the process of the tests is gone, killed or not."""
    import psutil

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    while psutil.pid_exists(owner):
        if not select.select([listener], [], [], 1.0)[0]:
            continue
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _become_worker(connection)
        connection.close()


def _become_worker(connection: socket.socket) -> None:
    import runpy
    import threading

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # As Ray's own workers: when one ends, Ray kills its process group, which must not be that of the tests.
    os.setpgid(0, 0)
    length, streams, _, _ = socket.recv_fds(connection, _LENGTH, 3)
    with connection.makefile("rb") as file:
        words, environment, folder = json.loads(file.read(int.from_bytes(length, "big")))
    for target, source in enumerate(streams):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))

    def end_with_the_program() -> None:
        connection.recv(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_the_program, daemon=True).start()
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    sys.exit()


def _stand_in(address: str, words: list[str]) -> None:
    """What Ray starts: asks for a worker and ends with it, or with Ray."""
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        message = json.dumps([words, dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(connection, [len(message).to_bytes(_LENGTH, "big")], [0, 1, 2])
        connection.sendall(message)
        while os.getppid() == parent and not select.select([connection], [], [], 1.0)[0]:
            pass


if __name__ == "__main__":
    _stand_in(sys.argv[1], sys.argv[2:])
