"""One Ray and one group of four for all controller tests: starting processes is what costs time here."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    start_ray(num_cpus=8, object_store_memory=256 * 1024**2)
    yield
    stop_ray()


@pytest.fixture(scope="session")
def pool(ray_cluster: None) -> RayResourcePool:
    return RayResourcePool([4], use_gpu=False, name_prefix="test", max_colocate_count=3)


class Roles:
    """Four processes that host an actor (adds 1) and a critic (adds 2); built again after a test has killed them."""

    def __init__(self, pool: RayResourcePool) -> None:
        self._pool = pool
        self._groups: dict[str, RayWorkerGroup] = {}

    def __getitem__(self, role: str) -> RayWorkerGroup:
        return self._groups[role]

    def revive(self) -> None:
        try:
            if self._groups:
                self._groups["actor"].ping()
                return
        except WorkerError:
            self._groups = {}
        classes = {role: RayClassWithInitArgs(Collective, offset) for role, offset in [("actor", 1.0), ("critic", 2.0)]}
        group = RayWorkerGroup(self._pool, create_colocated_worker_cls(classes))
        self._groups = group.spawn(classes)
        self._groups["actor"].init_mesh(2)


@pytest.fixture(scope="session")
def _roles(pool: RayResourcePool) -> Roles:
    return Roles(pool)


@pytest.fixture
def roles(_roles: Roles) -> Roles:
    _roles.revive()
    return _roles


@pytest.fixture
def group(roles: Roles) -> RayWorkerGroup:
    return roles["actor"]


@pytest.fixture
def two(pool: RayResourcePool) -> Iterator[RayWorkerGroup]:
    """Another group, on two slots of the same pool."""
    group = RayWorkerGroup(pool.split(2)[0], RayClassWithInitArgs(Collective), name_prefix="pair", failure_grace_s=2.0)
    yield group
    group.shutdown()
