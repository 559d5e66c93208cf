"""What toy runs share: the model and the data, and a Ray for those whose start of one is not what is tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dovetail.controller import start_ray, stop_ray
from tests.ray_workers import quick_workers
from tests.trainer.toy_run import Toy, make_toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="package")
def ray_here() -> Iterator[None]:
    """A run with `use_ray=True` in this process uses it and leaves it running."""
    start_ray(num_cpus=8, object_store_memory=256 * 1024**2, runtime_env=quick_workers())
    yield
    stop_ray()
