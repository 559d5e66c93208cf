"""The launcher that other tests rely on must itself report failures."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_alone, run_ranks

pytestmark = pytest.mark.distributed


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> float:
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return value.item()


def _fail_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def _die_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def test_ranks_communicate_and_return_in_order() -> None:
    assert run_ranks(_sum_of_ranks, 2, 10) == [21.0, 21.0]


def _tensor(rank: int, world_size: int) -> torch.Tensor:
    return torch.full((3,), float(rank))


def test_tensors_outlive_the_rank_that_returned_them() -> None:
    assert [tensor.tolist() for tensor in run_ranks(_tensor, 2)] == [[0.0] * 3, [1.0] * 3]


def _has_a_group(rank: int, world_size: int) -> tuple[bool, int]:
    return dist.is_initialized(), os.getpid()


def test_a_process_alone_is_in_no_group() -> None:
    joined, pid = run_alone(_has_a_group)
    assert not joined
    assert pid != os.getpid()
    assert run_ranks(_has_a_group, 1)[0][0]


def test_a_failing_rank_is_named_and_the_others_do_not_hang() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*broken on purpose"):
        run_ranks(_fail_on_rank_one, 2)


def test_a_dead_rank_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RuntimeError, match=r"rank [01] (died with exit code 7|failed)"):
        run_ranks(_die_on_rank_one, 2)
