"""vLLM in a Ray worker that sees one device of its node's eight."""

from __future__ import annotations

import pytest
import torch

from dovetail.controller.context import WorkerContext, device_index

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("vllm")]


@pytest.mark.parametrize("local_rank", [0, 3, 7])
def test_vllm_reads_a_local_rank_that_is_a_device_of_the_process(
    local_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's GPU worker asserts `local_rank < device_count`; the reading of the variable here is vLLM's own."""
    from vllm import envs
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    context = WorkerContext(rank=local_rank, world_size=8, local_rank=local_rank, local_world_size=8, needs_gpu=True)
    for name, value in context.env(device_index(context)).items():
        monkeypatch.setenv(name, value)
    _, rank, vllm_local_rank = ExecutorWithExternalLauncher.__new__(ExecutorWithExternalLauncher)._distributed_args()
    assert rank == local_rank
    assert vllm_local_rank < torch.cuda.device_count()
    assert vllm_local_rank == envs.LOCAL_RANK
