"""A process group of this process (rank 0) and SGLang's model processes, to broadcast weights over gloo or NCCL.

SGLang joins with `init_weights_update_group` and then receives tensors in the order of the names it is told. The group
is made here as SGLang makes it: same store, same prefixes. The port is bound before anybody is told of it.
"""

from __future__ import annotations

import uuid
from typing import Any

import torch
from torch import Tensor

from dovetail.weight_sync.broadcast import LOOPBACK, serve_store
from dovetail.weight_sync.group import GroupBackend, GroupPlace, TransferGroup

DEFAULT_TIMEOUT_S = 300.0


class WeightGroup:
    """Build it, have every instance join with `join_body`, and `connect` meanwhile."""

    def __init__(
        self,
        num_instances: int,
        workers_each: int,
        *,
        backend: GroupBackend = "gloo",
        device: torch.device | str = "cpu",
        host: str = LOOPBACK,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.name = f"dovetail-{uuid.uuid4().hex}"
        self._backend: GroupBackend = backend
        self._device = torch.device(device)
        self._host = host
        self._timeout_s = timeout_s
        self._workers_each = workers_each
        self._world_size = 1 + num_instances * workers_each
        self._store, self._port = serve_store(host, timeout_s)
        self._group: TransferGroup | None = None

    def join_body(self, index: int) -> dict[str, Any]:
        """What the index-th instance is told."""
        return {
            "master_address": self._host,
            "master_port": self._port,
            "rank_offset": 1 + index * self._workers_each,
            "world_size": self._world_size,
            "group_name": self.name,
            "backend": self._backend,
        }

    def connect(self) -> None:
        """Blocks until every worker of every instance has joined."""
        place = GroupPlace(self.name, 0, self._world_size, self._backend, self._timeout_s, local=self._host)
        self._group = TransferGroup(self._store, place)

    def broadcast(self, tensor: Tensor) -> None:
        assert self._group is not None, "connect() comes first"
        self._group.broadcast(tensor.to(self._device).contiguous())

    def close(self) -> None:
        """Leave; who still waits for this process gets an error."""
        if self._group is not None:
            self._group.close()
        self._group = None
