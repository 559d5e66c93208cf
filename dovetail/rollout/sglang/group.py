"""A process group of this process (rank 0) and SGLang's model processes, to broadcast weights over gloo or NCCL.

SGLang joins with `init_weights_update_group` and then receives tensors in the order of the names it is told. The group
is made here as SGLang makes it: same store, same prefixes. The port is bound before anybody is told of it.
"""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.weight_sync.broadcast import LOOPBACK, GroupBackend, broadcast_tensor, serve_store

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
        self._group: Any = None

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
        # torch puts the group's name, and then the first device the backend serves, before SGLang's own prefix.
        store = dist.PrefixStore(self.name, self._store)
        store = dist.PrefixStore(
            f"{'cuda' if self._backend == 'nccl' else 'cpu'}/", dist.PrefixStore(f"{self.name}/", store)
        )
        timeout = timedelta(seconds=self._timeout_s)
        if self._backend == "nccl":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timeout
            self._group = nccl(store, 0, self._world_size, options)
            return
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=self._host)]
        self._group = gloo(store, 0, self._world_size, options)

    def broadcast(self, tensor: Tensor) -> None:
        assert self._group is not None, "connect() comes first"
        broadcast_tensor(self._group, tensor.to(self._device).contiguous())
