"""Runs programs under limits and ends each with everything it started. `sandbox.py` asks for one at a time.

This process forks a launcher for every program: an interpreter takes longer to start than most programs to run. The
launcher keeps the time and cleans up, its child becomes the program. With `isolate` the child is the first process of
its own PID, network, IPC and mount namespaces: when it ends, the kernel ends all others in there, and it sees only the
interpreter, the system's libraries and an empty folder. Without, on Linux, orphans come back to the launcher (it is a
subreaper) and are killed one by one. Imports little and nothing of dovetail: programs find it in memory.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import site
import socket
import sys
import time

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NETWORK = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE, _NO_SUID, _NO_DEVICES = 1, 32, 4096, 16384, 1 << 18, 2, 4
_KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048  # nosuid, nodev, noexec, noatime, nodiratime: locked in a user namespace.
_DETACH = 2
_PARENT_DEATH, _NO_NEW_PRIVILEGES, _SUBREAPER = 1, 38, 36
_NOBODY = 65534
_SYSTEM = (
    "/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom",
)  # fmt: skip


class _TimeUp(Exception):
    """The program's time is over, or whoever asked for it is gone."""


def serve() -> int:
    """Fork a launcher for every request that comes over the socket at file 0, and say its pid; until it is closed.

    Returns an exit code: here when nobody asks any more, and in each program when it has run.
    """
    requests = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for launchers
    while True:
        data, files, _, _ = socket.recv_fds(requests, 1 << 16, 4)
        if not data:
            return 0
        while len(data) < 4 + int.from_bytes(data[:4], "big"):
            data += requests.recv(1 << 16)
        launcher = os.fork()
        if launcher == 0:
            requests.close()
            return _launch(data[4:].decode().split("\0"), files)
        for file in files:
            os.close(file)
        requests.sendall(launcher.to_bytes(4, "big"))


def _launch(words: list[str], files: list[int]) -> int:
    """In a process of its own: run a program, report how it ended, exit. Returns in the program only."""
    settings = dict(zip(words[::2], words[1::2], strict=True))
    report, isolated = files[3], settings["isolate"] == "yes"
    os.setsid()
    for target, file in enumerate(files[:3]):
        os.dup2(file, target)
        os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = -1
    try:
        os.chdir(settings["root"])
        with open(settings["program"]) as file:
            code = file.read()
        if sys.platform == "linux":
            _prctl(_PARENT_DEATH, signal.SIGKILL if isolated else signal.SIGTERM)
            _prctl(_SUBREAPER, 1)
        if isolated:
            _leave_namespaces()
        child = os.fork()
        if child == 0:
            _confine(settings, isolated)
            os.close(report)
    except OSError as error:
        os.write(report, f"unavailable {error}".encode())
        os._exit(1)
    if child == 0:
        return _run(code, settings["packages"].split(os.pathsep))
    os.write(report, _supervise(child, float(settings["timeout"])).encode())
    os._exit(0)


def _run(code: str, packages: list[str]) -> int:
    site.setquit()
    sys.path += packages
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    try:
        exec(compile(code, "program.py", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  shown as the interpreter shows it
        # As if it had been started alone: without the frames of this file. A syntax error has no other.
        own = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(own), own)
        return 1
    return 0


def _supervise(child: int, timeout: float) -> str:
    """Wait for the program, at most for its time; then kill it and all it started."""

    def time_up(*_: object) -> None:
        raise _TimeUp

    signal.signal(signal.SIGTERM, time_up)
    signal.signal(signal.SIGALRM, time_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout)
        _, status = os.waitpid(child, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        ended = f"exit {os.waitstatus_to_exitcode(status)}"
    except _TimeUp:
        ended = "timeout"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _kill_tree(child)
    return ended


def _kill_tree(child: int) -> None:
    """Everything below this process: killed parents leave their children to the subreaper, until none is left."""
    _kill(-child)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for pid in {child, *_children()}:
            _kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _kill(pid: int) -> None:
    try:  # noqa: SIM105  contextlib is not worth its import here
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # Gone already, or not born yet: a program makes its group as its first act.


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []  # In a namespace the kernel ends them; elsewhere than on Linux only the process group is known.


def _leave_namespaces() -> None:
    """Children are born into namespaces of their own. Root needs no user namespace; everybody else gets one."""
    flags = _NEW_MOUNTS | _NEW_IPC | _NEW_PIDS | _NEW_NETWORK
    uid, gid = os.getuid(), os.getgid()
    if uid == 0 and _LIBC.unshare(flags) == 0:
        return
    _check(_LIBC.unshare(flags | _NEW_USER), "unshare")
    for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _confine(settings: dict[str, str], isolated: bool) -> None:
    """In the child, before the program: its group, its view of the files, its rights, its limits."""
    if isolated:
        _build_root(settings["root"], [*_SYSTEM, *settings["readable"].split(os.pathsep)])
        _become_nobody()
        _drop_capabilities()
    os.setsid()
    if sys.platform == "linux":
        _prctl(_NO_NEW_PRIVILEGES, 1)
        _prctl(_PARENT_DEATH, signal.SIGKILL)
    seconds, output = int(float(settings["timeout"])) + 2, int(settings["output"])
    limits = [(resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, output), (resource.RLIMIT_CORE, 0)]
    if sys.platform == "linux":
        limits.append((resource.RLIMIT_AS, int(settings["memory"])))
    if isolated:
        limits.append((resource.RLIMIT_NPROC, int(settings["processes"])))
    for name, value in limits:
        resource.setrlimit(name, (value, value))


def _become_nobody() -> None:
    """Root's processes are not counted by RLIMIT_NPROC, and root may do more than a program should."""
    if os.getuid() != 0:
        return
    try:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    except OSError:
        pass  # In a user namespace of one user there is nobody else to become.


def _build_root(root: str, readable: list[str]) -> None:
    """A new root in memory: these paths read-only, a /tmp that is empty but for those below it, nothing else."""
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NO_SUID | _NO_DEVICES, "size=64m,mode=755")
    for path in readable:
        _show(root, path)
    for name in ("tmp", "proc", "old"):
        os.makedirs(f"{root}/{name}", exist_ok=True)  # an interpreter in /tmp is shown there
    os.chmod(f"{root}/tmp", 0o1777)
    try:  # noqa: SIM105
        _mount("proc", f"{root}/proc", "proc", _NO_SUID | _NO_DEVICES)
    except OSError:
        pass  # Not granted in every container, and needed by few programs.
    _check(_LIBC.pivot_root(root.encode(), f"{root}/old".encode()), "pivot_root")
    os.chdir("/tmp")
    _check(_LIBC.umount2(b"/old", _DETACH), "umount2")
    os.rmdir("/old")


def _show(root: str, path: str) -> None:
    target = root + path
    if not os.path.lexists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT))
    _mount(path, target, None, _BIND | _RECURSIVE)
    kept = os.statvfs(target).f_flag & _KEPT_FLAGS
    _mount("none", target, None, _BIND | _REMOUNT | _READ_ONLY | _NO_SUID | kept)


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(_LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    result = _LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount of {source} on {target}")


def _prctl(option: int, value: int) -> None:
    _check(_LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
