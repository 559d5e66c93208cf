"""Worker classes for the controller's tests. Arithmetic small enough to check by hand."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch

from dovetail.controller import Dispatch, Execute, Worker, register
from dovetail.protocol import DataProto
from tests.waiting import wait_until

logger = logging.getLogger("dovetail.tests")


def batch(rows: int) -> DataProto:
    """Rows 0, 1, 2, ... in column ``x``."""
    return DataProto.from_dict(tensors={"x": torch.arange(rows, dtype=torch.float32)})


def column(data: DataProto, name: str = "x") -> list[float]:
    return data.tensors[name].tolist()


def add_rank(worker: Worker, data: DataProto) -> DataProto:
    return DataProto.from_dict(tensors={"x": data.tensors["x"] + 100 * worker.rank})


class Calculator(Worker):
    """One method per dispatch mode, and ways to fail."""

    def __init__(self, offset: float = 0.0, fail_on_rank: int | None = None) -> None:
        super().__init__()
        self.offset = offset
        self.seen_rows: list[int] = []
        if fail_on_rank == self.rank:
            raise ValueError(f"cannot be built on rank {self.rank}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_mesh(self, tensor_parallel: int) -> None:
        self._register_dispatch_collect_info(
            "actor", dp_rank=self.rank // tensor_parallel, is_collect=self.rank % tensor_parallel == 0
        )
        # A mesh whose data-parallel order is not the order of the ranks.
        self._register_dispatch_collect_info("reversed", dp_rank=self.world_size - 1 - self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def describe(self, word: str, *, mark: str = "") -> str:
        return f"{word}{mark}-{self.rank}/{self.world_size}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "pid": os.getpid(),
            "local_rank": self.local_rank,
            "local_world_size": self.local_world_size,
            "colocated": sorted(self.colocated),
            "env": {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS")},
            "port": self.master_port,
        }

    @register()
    def all_to_all(self, value: Any) -> Any:
        return (self.rank, value)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def multiply(self, a: float, b: float) -> float:
        return a * b

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def plus(self, data: DataProto, amount: float = 0.0) -> DataProto:
        self.seen_rows.append(len(data))
        return DataProto.from_dict(tensors={"x": data.tensors["x"] + amount + self.offset})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def sample_twice(self, data: DataProto) -> DataProto:
        return data.repeat(2, interleave=True)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def plus_later(self, data: DataProto, amount: float = 0.0) -> DataProto:
        return DataProto.from_dict(tensors={"x": data.tensors["x"] + amount})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def gated_plus(self, data: DataProto, gate: str) -> DataProto:
        """Once the file `gate` is there."""
        wait_until(Path(gate).exists, f"the file {gate}")
        return DataProto.from_dict(tensors={"x": data.tensors["x"] + 1})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def uneven(self, data: DataProto) -> DataProto:
        """Rank r returns its rows r + 1 times."""
        return data.repeat(self.rank + 1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, materialize_futures=False)
    def kind_of_argument(self, data: Any) -> DataProto:
        fetched = data if isinstance(data, DataProto) else data.get()
        return DataProto(batch=fetched.batch, meta_info={"kind": type(data).__name__})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def total(self, data: DataProto) -> float:
        return float(data.tensors["x"].sum())

    @register(dispatch_mode=Dispatch.mesh("actor", pad=True))
    def mesh_plus(self, data: DataProto, other: DataProto | None = None) -> DataProto:
        extra = 0 if other is None else other.tensors["x"]
        # Only the collecting rank returns the truth: the others must not be collected.
        wrong = 0 if self._meshes["actor"][1] else 10_000
        return DataProto.from_dict(tensors={"x": data.tensors["x"] + extra + wrong})

    @register(dispatch_mode=Dispatch.mesh("actor"))
    def mesh_train(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"rows": len(data)}})

    @register(dispatch_mode=Dispatch.mesh("reversed"))
    def mesh_reversed(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.mesh("nobody"))
    def mesh_unknown(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def only_rank_zero(self, value: Any) -> Any:
        return (self.rank, value)

    @register(execute_mode=Execute.RANK_ZERO)
    def executed_by_rank_zero(self, value: Any) -> Any:
        return (self.rank, value)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wait_a_moment(self) -> int:
        import asyncio

        await asyncio.sleep(0.01)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def log(self, text: str, rank: int) -> None:
        if self.rank == rank:  # Ray folds equal lines of several processes into one
            logger.info(text)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rows_seen(self) -> list[int]:
        return self.seen_rows

    def not_registered(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int) -> int:
        if self.rank == rank:
            raise KeyError(f"no such thing on {rank}")
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def fail_on_later(self, rank: int) -> int:
        return self.fail_on(rank)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def fail_with_batch(self, data: DataProto) -> DataProto:
        raise KeyError("upstream is broken")


class Collective(Calculator):
    """Ranks that wait for each other."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.init_process_group()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_reduce(self) -> float:
        value = torch.tensor([float(self.rank)])
        torch.distributed.all_reduce(value)
        return value.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_reduce_unless(self, failing_rank: int, how: str) -> float:
        """The others say that they come to the collective; only then does this rank fail."""
        ready = torch.ones(1)
        if self.rank != failing_rank:
            torch.distributed.send(ready, failing_rank)
            return self.all_reduce()
        for rank in set(range(self.world_size)) - {failing_rank}:
            torch.distributed.recv(ready, rank)
        if how == "raise":
            raise RuntimeError("out of patience")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("the kernel did not kill this process")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for_ever(self) -> None:
        threading.Event().wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self) -> int:
        return self.rank
