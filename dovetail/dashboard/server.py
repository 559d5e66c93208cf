"""Serve the dashboard on this machine: 127.0.0.1 only, the wanted port or a free one."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

HOST = "127.0.0.1"
DEFAULT_PORT = 6262


def bind(port: int | None) -> socket.socket:
    """A listening place. Without a wish: the default port, or any free one when it is taken."""
    try:
        return _bound(DEFAULT_PORT if port is None else port)
    except OSError:
        if port is not None:
            raise
        return _bound(0)


def serve(app: FastAPI, listening: socket.socket, *, started: Callable[[str], None]) -> None:
    """Answer until interrupted. `started` gets the address once the port is bound."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    started(f"http://{HOST}:{listening.getsockname()[1]}")
    uvicorn.Server(config).run(sockets=[listening])


def _bound(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        # Who reads the address may connect at once, before the server has started.
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
