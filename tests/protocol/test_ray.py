"""Batches through a real Ray: to the bit, without copies, and no worker can change what another one reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from dovetail.controller import start_ray, stop_ray
from dovetail.protocol import DataProto, is_readonly
from tests.protocol.batches import assert_same, make_batch
from tests.ray_workers import quick_workers

pytestmark = pytest.mark.distributed


class Scribbler:
    """A worker that tries to write into the batch it gets."""

    def scribble(self, batch: DataProto) -> str:
        try:
            batch.batch["float32"].zero_()
        except RuntimeError as error:
            return str(error)
        return "written"


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Any]]:
    # Another module's Ray may still run in this process: use it, and leave it to its owner.
    owns_ray = not ray.is_initialized()
    start_ray(num_cpus=2, object_store_memory=256 * 2**20, log_to_driver=False, runtime_env=quick_workers())
    try:
        yield [ray.remote(num_cpus=0)(Scribbler).remote() for _ in range(2)]
    finally:
        if owns_ray:
            stop_ray()


def test_put_and_get_gives_the_same_batch_over_shared_memory(workers: list[Any]) -> None:
    batch = make_batch(64)
    reference = ray.put(batch)
    first, second = ray.get(reference), ray.get(reference)
    assert_same(first, batch)
    assert first.batch["float32"].data_ptr() == second.batch["float32"].data_ptr()
    assert all(is_readonly(tensor) for tensor in first.tensors.values())


def test_received_tensors_outlive_the_reference(workers: list[Any]) -> None:
    batch = DataProto.from_dict({"x": torch.arange(2**20)})
    column = ray.get(ray.put(batch)).batch["x"]
    # Enough new objects to overwrite the store, had the first one been freed.
    for number in range(40):
        ray.put(DataProto.from_dict({"x": torch.full((2**20,), number)}))
    assert torch.equal(column, batch.batch["x"])


def test_no_worker_can_write_what_another_reads(workers: list[Any]) -> None:
    batch = make_batch(8)
    reference = ray.put(batch)
    messages = ray.get([worker.scribble.remote(reference) for worker in workers])
    assert all("'zero_' would write into a column that other processes share" in message for message in messages)
    assert_same(ray.get(reference), batch)
