"""Pools with GPUs: fractions of one GPU, devices of workers, NCCL."""

from __future__ import annotations

import pytest
import torch

from dovetail.controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register

pytestmark = pytest.mark.gpu


class OnDevice(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce_on_device(self) -> tuple[str, float, str]:
        self.init_process_group()
        value = torch.ones(4, device=self.device)
        torch.distributed.all_reduce(value)
        return str(self.device), value.sum().item(), torch.distributed.get_backend_config()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def which_device(self) -> str:
        return str(self.device)


def test_two_groups_share_one_gpu_and_a_cpu_pool_keeps_off_it(ray_cluster: None) -> None:
    gpus = RayResourcePool([1], use_gpu=True, max_colocate_count=2)
    cpus = RayResourcePool([1], use_gpu=False)
    spec = RayClassWithInitArgs(OnDevice)
    groups = [RayWorkerGroup(pool, spec) for pool in (gpus, gpus, cpus)]
    try:
        for group in groups[:2]:
            assert group.reduce_on_device() == [("cuda:0", 4.0, "cpu:gloo,cuda:nccl")]
        assert groups[2].which_device() == ["cpu"]
    finally:
        for group in groups:
            group.shutdown()
        gpus.release()
        cpus.release()
