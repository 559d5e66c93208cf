"""One Ray for all controller tests, on loopback, with room for 12 processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dovetail.controller import RayResourcePool, start_ray, stop_ray


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    start_ray(num_cpus=12, object_store_memory=256 * 1024**2)
    yield
    stop_ray()


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[RayResourcePool]:
    pool = RayResourcePool([4], use_gpu=False, name_prefix="test", max_colocate_count=3)
    yield pool
    pool.release()
