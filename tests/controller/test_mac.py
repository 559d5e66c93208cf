"""What the demo calls on a Mac, against a system that answers as a Mac does. No Mac was at hand."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
import sys
from types import SimpleNamespace

import pytest

from dovetail.controller import spans
from dovetail.controller.cluster import default_object_store_bytes
from dovetail.controller.context import WorkerContext
from dovetail.controller.rendezvous import _interface_for_gloo
from dovetail.observability.memory import peak_resident_gib

pytestmark = pytest.mark.unit

ADDRESSES = {"lo0": "127.0.0.1", "en0": "192.168.1.7"}


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interfaces, ioctl numbers, memory and folders of a laptop with 16 GiB."""

    def ioctl(_: int, request: int, argument: bytes) -> bytes:
        name = argument.split(b"\0")[0].decode()
        if request != 0xC0206921 or name not in ADDRESSES:
            raise OSError(102, "Operation not supported on socket")
        # struct ifreq: 16 bytes of name; sin_len, sin_family, sin_port, then the address.
        head = struct.pack("16sBBH", name.encode(), 16, 2, 0)
        return (head + socket.inet_aton(ADDRESSES[name])).ljust(len(argument), b"\0")

    sizes = {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 16 * 1024**3 // 16384}
    is_folder = os.path.isdir
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo0"), (2, "gif0"), (3, "en0")])
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(os.path, "isdir", lambda path: path != "/dev/shm" and is_folder(path))
    monkeypatch.setattr(spans, "_STATM", "/there/is/no/proc/on/a/mac")


@pytest.mark.usefixtures("mac")
def test_gloo_is_given_the_loopback_interface_of_a_mac() -> None:
    assert _interface_for_gloo(WorkerContext()) == "lo0"


def test_gloo_is_given_the_loopback_interface_of_this_machine() -> None:
    name = _interface_for_gloo(WorkerContext())
    assert name in [known for _, known in socket.if_nameindex()]


def test_another_system_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "sunos5")
    with pytest.raises(RuntimeError, match=r"sunos5.*set GLOO_SOCKET_IFNAME"):
        _interface_for_gloo(WorkerContext())


@pytest.mark.usefixtures("mac")
def test_the_object_store_on_a_mac_is_one_that_ray_starts_with() -> None:
    """Ray raises ValueError for more than 2 GiB on a Mac; a fifth of 16 GiB is more."""
    assert default_object_store_bytes() == 2 * 1024**3


@pytest.mark.usefixtures("mac")
def test_memory_without_proc_is_the_peak_and_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(ru_maxrss=3 * 1024**3)  # a Mac reports bytes
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    assert peak_resident_gib() == 3.0
    assert spans._resident_gib() == 3.0
