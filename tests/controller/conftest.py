"""One Ray and one group of four for all controller tests: starting processes is what costs time here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dovetail.controller import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerError,
    create_colocated_worker_cls,
    start_ray,
    stop_ray,
)
from tests.controller.worker_examples import Collective
from tests.ray_workers import quick_workers


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    start_ray(num_cpus=8, object_store_memory=256 * 1024**2, runtime_env=quick_workers())
    yield
    stop_ray()


@pytest.fixture(scope="package")
def pool(ray_cluster: None) -> RayResourcePool:
    return RayResourcePool([4], use_gpu=False, name_prefix="test", max_colocate_count=3)


Roles = dict[str, RayWorkerGroup]
"""Groups by role, on shared processes."""


class Revived:
    """Groups that tests share, built again after a test has killed them."""

    def __init__(self, build: Callable[[], Roles]) -> None:
        self._build = build
        self._groups: Roles = {}

    def get(self) -> Roles:
        try:
            for group in self._groups.values():
                group.ping()
        except WorkerError:
            for group in self._groups.values():
                group.shutdown()
            self._groups = {}
        self._groups = self._groups or self._build()
        return self._groups


@pytest.fixture(scope="package")
def _roles(pool: RayResourcePool) -> Revived:
    def build() -> Roles:
        classes = {role: RayClassWithInitArgs(Collective, offset) for role, offset in [("actor", 1.0), ("critic", 2.0)]}
        groups = RayWorkerGroup(pool, create_colocated_worker_cls(classes)).spawn(classes)
        groups["actor"].init_mesh(2)
        return groups

    return Revived(build)


@pytest.fixture(scope="package")
def _two(pool: RayResourcePool) -> Revived:
    def build() -> Roles:
        half = pool.split(2)[0]
        return {"pair": RayWorkerGroup(half, RayClassWithInitArgs(Collective), name_prefix="pair", failure_grace_s=2.0)}

    return Revived(build)


@pytest.fixture
def roles(_roles: Revived) -> Roles:
    """Four processes that host an actor (adds 1) and a critic (adds 2)."""
    return _roles.get()


@pytest.fixture
def group(roles: Roles) -> RayWorkerGroup:
    return roles["actor"]


@pytest.fixture
def two(_two: Revived) -> RayWorkerGroup:
    """Another group, on two slots of the same pool."""
    return _two.get()["pair"]
