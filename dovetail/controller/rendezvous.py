"""How the ranks of a group find each other. Ports are taken by binding them, never guessed.

Rank 0 binds a socket to port 0, learns the port the kernel gave it and serves a torch ``TCPStore`` on that very
socket: there is no moment in which another process could take the port. The address travels to the other ranks with
their context, and every process group is built on that store. On one machine everything binds to loopback.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from dovetail.controller.context import WorkerContext

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT = timedelta(minutes=5)
# Collectives of a training step can wait for a long generation on another rank.
COLLECTIVE_TIMEOUT = timedelta(minutes=60)


def serve_store(host: str) -> tuple[str, int]:
    """Serve a key-value store on a free port of ``host`` for the life of the process; return the bound address."""
    store, port = open_store(host, STORE_TIMEOUT)
    _SERVED[host, port] = store
    return host, port


def open_store(host: str, timeout: timedelta) -> tuple[Store, int]:
    """A key-value store on a free port of ``host``, which is returned too. It is served as long as the object lives."""
    from torch.distributed import TCPStore

    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(4096)
    port = listener.getsockname()[1]
    fd = listener.detach()
    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=fd), port


def hold_port(host: str) -> socket.socket:
    """A port that is bound and does not listen: on Linux a second socket with SO_REUSEADDR, such as that of a server or
    of torch's store, may still bind it, and nobody is given it by chance."""
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    return holder


def reserve_port(host: str) -> int:
    """A port that only a process of this machine which asks for it by number gets, for `env://` rendezvous."""
    holder = hold_port(host)
    port = holder.getsockname()[1]
    if sys.platform == "linux":
        _RESERVED.append(holder)
    else:
        holder.close()  # elsewhere the second bind would fail: the port is free, and unlikely to be taken
    return port


def join_store(context: WorkerContext) -> Store:
    """The store of the group: the one this process serves, or a connection to it. A world of one needs no socket."""
    from torch.distributed import HashStore, TCPStore

    if context.master_addr is None or context.store_port is None:
        if context.world_size > 1:
            raise ValueError(
                f"{context.role} has world_size={context.world_size} but no address of a store; build it through a "
                "worker group, or set MASTER_ADDR and MASTER_PORT."
            )
        return HashStore()
    address = (context.master_addr, context.store_port)
    if address not in _SERVED:
        return TCPStore(*address, is_master=False, timeout=STORE_TIMEOUT)
    return _SERVED[address]


def init_process_group(
    context: WorkerContext, backend: str, *, device: torch.device | None = None, timeout: timedelta = COLLECTIVE_TIMEOUT
) -> None:
    """Build the default process group of this process on the group's store.

    Roles that share a process share its default group: the second call checks that the world is the same and returns.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (context.rank, context.world_size):
            raise RuntimeError(
                f"the process already belongs to a group as rank {dist.get_rank()} of {dist.get_world_size()}, but "
                f"{context.role} is rank {context.rank} of {context.world_size}; roles that share a process must "
                "share its world."
            )
        return
    if "gloo" in backend:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_for_gloo(context))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("default", join_store(context)),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
        device_id=device if device is not None and device.type == "cuda" else None,
    )


def _interface_for_gloo(context: WorkerContext) -> str:
    """Gloo would resolve the host name, which on many machines is an address that other nodes cannot reach."""
    if context.single_node:
        return next(name for _, name in socket.if_nameindex() if _ipv4_of(name) == LOOPBACK)
    for _, name in socket.if_nameindex():
        if _ipv4_of(name) == context.node:
            return name
    raise RuntimeError(
        f"no network interface of this machine has the address {context.node} that Ray reports for it; "
        "set GLOO_SOCKET_IFNAME to the interface that reaches the other nodes."
    )


def _ipv4_of(interface: str) -> str | None:
    import fcntl

    get_address = _GET_ADDRESS.get(sys.platform)
    if get_address is None:
        raise RuntimeError(
            f"how to ask {sys.platform} for the address of a network interface is not known here; set "
            "GLOO_SOCKET_IFNAME to the interface that the ranks shall use (on one machine: its loopback interface)."
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", interface[:15].encode()))
        except OSError:  # an interface without an IPv4 address
            return None
    return socket.inet_ntoa(reply[20:24])


# SIOCGIFADDR. The address of the reply has the same place on both.
_GET_ADDRESS = {"linux": 0x8915, "darwin": 0xC0206921}
_SERVED: dict[tuple[str, int], Store] = {}
_RESERVED: list[socket.socket] = []
