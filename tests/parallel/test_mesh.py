"""Meshes on real processes: who shares rows, who shares parameters."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from dovetail.parallel.mesh import create_parallel_mesh
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def _place(rank: int, size: int, fsdp_size: int, sp_size: int) -> tuple:
    mesh = create_parallel_mesh("cpu", fsdp_size=fsdp_size, sp_size=sp_size)
    sp_ranks = dist.get_process_group_ranks(mesh.sp_group) if mesh.sp_group is not None else None
    return (
        (mesh.dp_rank, mesh.dp_size, mesh.sp_rank, mesh.sp_size),
        mesh.is_hybrid,
        mesh.fsdp.mesh_dim_names,
        dist.get_process_group_ranks(mesh.fsdp.get_group("shard")),
        dist.get_process_group_ranks(mesh.dp_group),
        sp_ranks,
    )


def test_hybrid_mesh_with_sequence_parallel_pairs_places_every_rank() -> None:
    places = run_ranks(_place, 4, 2, 2)
    assert [p[0] for p in places] == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]
    assert all(p[1] and p[2] == ("replicate", "shard") for p in places)
    assert [p[3] for p in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [p[4] for p in places] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [p[5] for p in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_default_mesh_shards_over_all_ranks_and_has_no_sequence_group() -> None:
    places = run_ranks(_place, 2, -1, 1)
    assert [p[0] for p in places] == [(0, 2, 0, 1), (1, 2, 0, 1)]
    assert all(not p[1] and p[2] == ("shard",) and p[3] == [0, 1] and p[5] is None for p in places)


def _bad(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="fsdp_size=3 does not divide the 4 processes"):
        create_parallel_mesh("cpu", fsdp_size=3)
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=3"):
        create_parallel_mesh("cpu", sp_size=3)


def test_sizes_that_do_not_divide_are_refused() -> None:
    run_ranks(_bad, 4)
