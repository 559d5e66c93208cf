"""Programs of answers: what they can reach, and that nothing of them is left behind.

Where the machine allows no namespaces the tests hold the other half of the promise: that this is said.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.config import DovetailConfig
from dovetail.rewards import sandbox as sandbox_module
from dovetail.rewards.registry import check_sources, default_compute_score
from dovetail.rewards.sandbox import (
    Isolation,
    LocalSandbox,
    ProgramRun,
    SandboxUnavailable,
    _interpreter_folders,
    detect_isolation,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.unit

OPEN = Isolation(False, sys.platform == "linux", "asked for by a test")
ESCAPE = """
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "{mark}"])
    os._exit(0)
{then}
"""

FULL = """
import os, sys, tempfile
from dovetail.rewards.registry import default_compute_score
from dovetail.rewards.sandbox import Isolation, LocalSandbox

tempfile.tempdir = sys.argv[1]
with open(os.path.join(sys.argv[1], "others"), "wb", buffering=0) as file:
    while (disk := os.statvfs(sys.argv[1])).f_bavail * disk.f_frsize > 100 << 10:
        file.write(bytes(4096))
truth = {"inputs": [""], "outputs": ["x" * 300000]}
try:
    sandbox = LocalSandbox(isolation=Isolation(False, True, "a test"))
    print(default_compute_score("apps", "print('x' * 300000)", truth, sandbox=sandbox))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture(params=["this machine", "without namespaces"])
def sandbox(request: pytest.FixtureRequest) -> LocalSandbox:
    return LocalSandbox(isolation=detect_isolation() if request.param == "this machine" else OPEN)


def run(sandbox: LocalSandbox, code: str, timeout: float = 60.0, memory_limit_mb: int = 1024) -> ProgramRun:
    return sandbox.run(code, stdin="", timeout=timeout, memory_limit_mb=memory_limit_mb)


def processes_with(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if mark.encode() in command.split(b"\0") and state != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found through /proc")
@pytest.mark.parametrize("then", ["sys.exit(0)", "time.sleep(600)"])
def test_a_process_that_left_its_session_dies_with_the_program(sandbox: LocalSandbox, then: str) -> None:
    mark = uuid.uuid4().hex
    result = run(sandbox, ESCAPE.format(mark=mark, then=then), timeout=3.0 if "sleep" in then else 60.0)
    assert result.timed_out == ("sleep" in then)
    wait_until(lambda: not processes_with(mark), "the end of the process that left its session")


def test_a_program_with_its_exit_code_output_and_error(sandbox: LocalSandbox) -> None:
    assert run(sandbox, "print(input())" and "import sys; print(sys.stdin.read() or 'none')").stdout == "none\n"
    failed = run(sandbox, "raise KeyError('x')")
    assert (failed.ok, failed.stderr.splitlines()[-1]) == (False, "KeyError: 'x'")
    assert not run(sandbox, "import sys; sys.exit(3)").ok
    assert not run(sandbox, "import ctypes; ctypes.string_at(0)").ok
    assert not run(sandbox, "import os; os.abort()").ok
    assert run(sandbox, "open('a', 'w').write('kept'); print(open('a').read())").stdout == "kept\n"


def test_memory_and_output_are_limited(sandbox: LocalSandbox) -> None:
    greedy = run(sandbox, "x = bytearray(1 << 30)", memory_limit_mb=256)
    assert (greedy.ok, "MemoryError" in greedy.stderr) == (False, True)
    loud = run(sandbox, "while True: print('x' * 1000000)")
    assert not loud.ok
    assert len(loud.stdout) <= 1 << 20


@pytest.fixture
def secret() -> Iterator[Path]:
    path = Path.home() / f".secret-{uuid.uuid4().hex}"
    path.write_text("password")
    yield path
    path.unlink()


def test_files_of_the_user_are_hidden_or_it_is_said_that_they_are_not(secret: Path) -> None:
    isolation = detect_isolation()
    result = run(LocalSandbox(isolation=isolation), f"print(open({str(secret)!r}).read())")
    if isolation.is_sandbox:
        assert "password" not in result.stdout
        assert "FileNotFoundError" in result.stderr
        assert run(LocalSandbox(), f"open({os.__file__!r}, 'a')").stderr.count("Error") == 1, (
            "the interpreter is read-only"
        )
    else:
        assert "password" in result.stdout
        assert "NOT sandboxed" in isolation.describe()
        assert "read your files" in isolation.describe()


def test_there_is_no_network_or_it_is_said_that_there_is() -> None:
    isolation = detect_isolation()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        result = run(LocalSandbox(isolation=isolation), f"import socket; socket.create_connection({address}, 5)")
    assert result.ok != isolation.is_sandbox
    assert isolation.is_sandbox or "use the network" in isolation.describe()


def test_a_fork_bomb_is_contained_or_ends_with_its_time() -> None:
    isolation = detect_isolation()
    code = "import os, time\nfor _ in range({}):\n    if os.fork() == 0:\n        time.sleep(600)\n"
    if isolation.is_sandbox:
        assert "BlockingIOError" in run(LocalSandbox(isolation=isolation), code.format(500)).stderr
    else:
        assert "processes" not in isolation.describe().partition("limited")[0]
    # Without a limit the children end with the program all the same.
    assert run(LocalSandbox(isolation=OPEN), code.format(50)).ok


def test_an_interpreter_below_tmp_does_not_cost_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(sandbox_module, "_interpreter_folders", lambda: [*_interpreter_folders(), folder])
        found = detect_isolation.__wrapped__()
    assert "File exists" not in found.missing
    assert found == detect_isolation()


def test_a_right_program_on_a_full_disk_has_no_score_instead_of_0(tmp_path: Path) -> None:
    """On a disk of 4 MiB, in a process with mounts of its own."""
    (disk := tmp_path / "disk").mkdir()
    (program := tmp_path / "fill.py").write_text(FULL)
    mount = f"mount -t tmpfs -o size=4m tmpfs {disk} && exec {sys.executable} {program} {disk}"
    try:
        done = subprocess.run(
            ["unshare", "--mount", "--map-root-user", "sh", "-c", mount], capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this machine allows no mount namespace")
    assert done.stdout == f"SandboxUnavailable: the disk of {disk} is full; free some space, or set TMPDIR.\n", done


def test_what_is_missing_is_said_and_can_be_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = Isolation(False, True, "unshare: Operation not permitted")
    monkeypatch.setattr("dovetail.rewards.sandbox.detect_isolation", lambda: closed)
    with caplog.at_level(logging.INFO):
        check_sources(["openai/gsm8k"], {})
        assert not caplog.records, "no programs, nothing to say"
        check_sources(["apps"], {"sandbox_url": "http://elsewhere"})
        assert not caplog.records, "programs run elsewhere"
        check_sources(["apps"], {"code_isolation": "auto"})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "NOT sandboxed on this machine (unshare: Operation not permitted)" in record.getMessage()
    with pytest.raises(SandboxUnavailable, match=r"code_isolation=required.*sandbox_fusion\.url"):
        check_sources(["apps"], {"code_isolation": "required"})
    with pytest.raises(SandboxUnavailable, match="not permitted"):
        default_compute_score("apps", "print(1)", {"inputs": [""], "outputs": ["1"]}, code_isolation="required")


def test_isolation_is_a_setting() -> None:
    assert DovetailConfig().reward_model.code_isolation == "auto"
    with pytest.raises(ValueError, match="code_isolation"):
        DovetailConfig(reward_model={"code_isolation": "maybe"})
