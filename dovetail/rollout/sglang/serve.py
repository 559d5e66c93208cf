"""Runs an SGLang server. Started by `server.py` as a program, under a Python that may have SGLang and no dovetail.

Ends with whoever started it: its standard input is a pipe that nobody writes to, and that closes when the starter dies.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

WRONG_VERSION = 3
"""Exit status when SGLang is missing, or of a version that is not in the range given."""


def main() -> None:
    spec = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_starter, daemon=True).start()
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if not is_supported(version, spec["oldest"], spec["newest"]):
        sys.stderr.write(f"SGLang {version or 'none'} is installed for {sys.executable}\n")
        sys.exit(WRONG_VERSION)

    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    arguments = _forking(ServerArgs) if spec["fork"] else ServerArgs
    launch_server(arguments(**spec["arguments"]))


def is_supported(version: str, oldest: list[int], newest: list[int]) -> bool:
    """By the first three numbers: "0.5.18.post1" and "0.5.18+cu130" are 0.5.18."""
    numbers = [int(part) for part in version.split("+")[0].split(".")[:3]] if version else []
    return oldest <= numbers <= newest


def _forking(arguments: type[Any]) -> type[Any]:
    """SGLang starts its processes as new interpreters, and each imports all of SGLang again, which is most of the time
    that a start takes. Forked, they have it. A process that has looked at a GPU cannot be forked; here nothing has been
    computed and no thread but the one below runs.

    SGLang asks for new interpreters right before it checks its arguments, and starts processes right after.
    """

    class Forking(arguments):
        def check_server_args(self) -> None:
            super().check_server_args()
            multiprocessing.set_start_method("fork", force=True)

    return Forking


def _end_with_starter() -> None:
    # os.read, not sys.stdin: nothing may be waiting in a buffered reader's lock when the interpreter ends.
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
