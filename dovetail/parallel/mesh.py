"""Arrange the processes of a training group in a mesh: replicate x shard, with sequence-parallel groups inside.

Every rank has one place on two views of the same processes:

- the *shard view* `(replicate, shard)`: where parameters live. `shard` ranks hold one copy of the model together,
  `replicate` copies exist. FSDP2 takes this mesh as it is (2-D means hybrid sharding).
- the *batch view* `(dp, sp)`: who reads which rows. The ranks of one `sp` group read the same rows and share each
  sequence between them; different `dp` ranks read different rows.

Creates process groups, so every rank must call it, once. Knows nothing of models or batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class ParallelMesh:
    """The place of this rank. `dp_*` count groups that read different rows, `sp_*` the ranks that share a sequence."""

    world_size: int
    rank: int
    dp_rank: int
    dp_size: int
    sp_rank: int
    sp_size: int
    replicate_size: int
    shard_size: int
    fsdp: DeviceMesh
    """What `fully_shard(mesh=...)` takes: 1-D `("shard",)`, or 2-D `("replicate", "shard")` when hybrid."""
    batch: DeviceMesh
    """The `("dp", "sp")` view."""

    @property
    def is_hybrid(self) -> bool:
        return self.replicate_size > 1

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """Ranks with my `sp_rank`: their rows together are the batch."""
        return self.batch.get_group("dp")

    @property
    def sp_group(self) -> dist.ProcessGroup | None:
        """Ranks that share my rows; `None` without sequence parallelism, which is how callers ask."""
        return self.batch.get_group("sp") if self.sp_size > 1 else None


def create_parallel_mesh(device_type: str = "cpu", *, fsdp_size: int = -1, sp_size: int = 1) -> ParallelMesh:
    """Build both views over the default process group.

    `fsdp_size` is the number of ranks one copy of the parameters is spread over; -1 means all of them. Sequence
    neighbours are adjacent ranks, so that their all-to-all stays inside a machine.
    """
    world = dist.get_world_size()
    shard = world if fsdp_size in (-1, 0) or fsdp_size >= world else fsdp_size
    if world % shard:
        raise ValueError(
            f"fsdp_size={fsdp_size} does not divide the {world} processes; use a divisor of {world}, or -1."
        )
    if sp_size < 1 or world % sp_size:
        raise ValueError(
            f"ulysses_sequence_parallel_size={sp_size} does not divide the {world} processes; use a divisor of {world}."
        )
    replicate = world // shard
    if replicate > 1:
        fsdp = init_device_mesh(device_type, (replicate, shard), mesh_dim_names=("replicate", "shard"))
    else:
        fsdp = init_device_mesh(device_type, (shard,), mesh_dim_names=("shard",))
    batch = init_device_mesh(device_type, (world // sp_size, sp_size), mesh_dim_names=("dp", "sp"))
    return ParallelMesh(
        world_size=world,
        rank=dist.get_rank(),
        dp_rank=batch.get_local_rank("dp"),
        dp_size=world // sp_size,
        sp_rank=batch.get_local_rank("sp"),
        sp_size=sp_size,
        replicate_size=replicate,
        shard_size=shard,
        fsdp=fsdp,
        batch=batch,
    )
