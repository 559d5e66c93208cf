"""Megatron's gradient buffers: freed between updates, and whole again for whoever asks for a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.backends.megatron.parts import MegatronModel


class GradientBuffers:
    """The flat buffers behind `parameter.main_grad`. With `frees` they exist from backward to the optimizer's step
    only; a gradient is not worth a copy on the host, it is made anew."""

    def __init__(self, model: MegatronModel, *, frees: bool) -> None:
        self._chunks: list[Any] = list(model.wrapped)
        self._frees = frees
        self._sizes: dict[int, int] = {}

    def clear(self) -> None:
        """Zeros, in memory that is there again."""
        for index, buffer in enumerate(self._buffers()):
            if index in self._sizes:
                buffer.grad_data.untyped_storage().resize_(self._sizes.pop(index))
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def release(self) -> None:
        """After the step."""
        if not self._frees:
            return
        for index, buffer in enumerate(self._buffers()):
            storage = buffer.grad_data.untyped_storage()
            if storage.nbytes():
                self._sizes[index] = storage.nbytes()
                storage.resize_(0)

    def gather(self) -> None:
        """Whole gradients on every rank: the distributed optimizer leaves each rank its own part of them."""
        for chunk in self._chunks:
            if not chunk.ddp_config.use_distributed_optimizer:
                continue
            for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                ranks = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets:
                    _gather_bucket(bucket.grad_data, ranks)

    def _buffers(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from [*chunk.buffers, *chunk.expert_parallel_buffers]


def _gather_bucket(data: Tensor, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        own = data.chunk(group.size())[group.rank()].clone()
        dist.all_gather_into_tensor(data, own, group=group)


def read_gradient(parameter: torch.nn.Parameter) -> Tensor:
    """Of a parameter in Megatron's data parallelism."""
    return parameter.main_grad  # pyrefly: ignore[missing-attribute]
