"""A quick Python reads its command line as Python does, and its process is known by the program's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick_python import quick_python
from tests.waiting import wait_until_gone

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="a fork of a process with torch in it"),
]
SAYS = "import os, sys; print(sys.argv[1:], 'torch' in sys.modules, os.read(int(sys.argv[1]), 9), flush=True)"


@pytest.mark.parametrize("how", ["file", "text", "module"])
def test_a_program_gets_its_arguments_and_its_open_files_under_their_numbers(tmp_path: Path, how: str) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    words = {"file": ["-u", str(tmp_path / "says.py")], "text": ["-c", SAYS], "module": ["-m", "says"]}[how]
    reader, writer = os.pipe()
    os.write(writer, b"for you")
    os.close(writer)
    command = [quick_python().path, *words, str(reader), "a b"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, pass_fds=[reader], env=environment, capture_output=True, text=True, timeout=120)
    os.close(reader)
    assert done.stdout == f"['{reader}', 'a b'] True b'for you'\n", done.stderr


def test_a_process_is_known_by_its_program_and_ends_with_it() -> None:
    quick = quick_python()
    command = [quick.path, "-c", "import os, threading; print(os.getpid(), flush=True); threading.Event().wait()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        assert quick.forked_for(program.pid) == pid != program.pid
        program.kill()
    wait_until_gone(pid)


def test_processes_that_a_program_of_a_preloading_server_starts_come_from_there_too(tmp_path: Path) -> None:
    quick = quick_python("tomllib")
    (tmp_path / "child.py").write_text("import sys\n\ndef says(at):\n    at.send('torch' in sys.modules)\n")
    (tmp_path / "main.py").write_text(
        "import multiprocessing, sys\n"
        "from child import says\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    ours, theirs = context.Pipe()\n"
        "    process = context.Process(target=says, args=(theirs,))\n"
        "    process.start()\n"
        "    print('tomllib' in sys.modules, ours.recv())\n"
        "    process.join()\n"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    command = [quick.path, str(tmp_path / "main.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True True\n", done.stderr
