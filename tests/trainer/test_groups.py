"""A group that does not start leaves no slots reserved: another run may follow on the same Ray."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.trainer import groups
from tests.workers.tiny_run import run_config

pytestmark = pytest.mark.unit

APART = {
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.nnodes": 1,
    "trainer.method": "distill",
    "distill.teacher.nnodes": 1,
    "distill.teacher.path": "teacher",
}


@pytest.mark.parametrize("failing", ["trainer", "teacher", "rollout"])
def test_slots_of_all_groups_are_given_back_when_one_cannot_start(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[str] = []

    class Pool:
        def __init__(self, *_: Any, name_prefix: str, **__: Any) -> None:
            self.name = name_prefix

        def release(self) -> None:
            reserved.remove(self.name)

    class Group:
        def __init__(self, pool: Pool, worker: Any, *, name_prefix: str | None = None, **_: Any) -> None:
            reserved.append(pool.name)
            self.release = pool.release
            if (name_prefix or "trainer") == failing:
                raise RuntimeError(f"no {failing} after {reserved}")

        def spawn(self, roles: Any) -> dict[str, Any]:
            return dict.fromkeys(roles, self)

    monkeypatch.setattr(groups, "RayResourcePool", Pool)
    monkeypatch.setattr(groups, "RayWorkerGroup", Group)
    with pytest.raises(RuntimeError, match=f"no {failing}"):
        groups.create_groups(run_config("model", APART), use_ray=True, use_gpu=False)
    assert reserved == []
