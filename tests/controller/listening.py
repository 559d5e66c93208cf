"""Which addresses do a process and its descendants listen on? Read from /proc."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path


def listening_addresses(*root_pids: int) -> list[str]:
    """The addresses of all listening TCP sockets of these processes and those below them."""
    inodes = {inode for pid in _descendants(*root_pids) for inode in _socket_inodes(pid)}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # 0A is LISTEN
                found.append(str(_address(fields[1].split(":")[0])))
    return found


def is_loopback(address: str) -> bool:
    """Whether no other machine can reach it."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def _descendants(*root_pids: int) -> set[int]:
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            parents[int(entry)] = int(stat.rsplit(")", 1)[1].split()[1])
    family = set(root_pids)
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _socket_inodes(pid: int) -> list[str]:
    try:
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []
    return [link[8:-1] for link in links if link.startswith("socket:[")]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    # The kernel prints each 32-bit word in host order.
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))
