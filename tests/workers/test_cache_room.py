"""When the engine's cache stays on the device while the trainer works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dovetail.config import load_config
from dovetail.config.plan import make_plan, read_shapes
from dovetail.config.root import DovetailConfig
from dovetail.workers.cache_room import CacheRoom
from tests.config.plan import known_models as known

pytestmark = pytest.mark.unit

CUDA = torch.device("cuda")
GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(known.QWEN2_5_7B))
    return tmp_path


def config_of(model: Path, *more: str) -> DovetailConfig:
    policy = "actor_rollout_ref"
    settings = [f"{policy}.model.path={model}", f"{policy}.actor.use_dynamic_bsz=True", "trainer.device=cuda"]
    return load_config(overrides=["data.train_files=x.parquet", *settings, *more]).config


def test_it_stays_where_the_largest_phase_of_training_and_a_margin_leave_room(model: Path) -> None:
    config = config_of(model)
    room = CacheRoom.beside_training(config, CUDA)
    plan = make_plan(config, read_shapes(config))
    assert room is not None
    assert plan.memory is not None
    assert room.training_bytes == next(p.total for p in plan.memory.phases if p.name == "update actor")
    training, total = round(room.training_bytes), 300 * GIB
    assert room.fits(4 * GIB, training + 37 * GIB, total)
    assert not room.fits(6 * GIB, training + 37 * GIB, total)
    assert not room.fits(4 * GIB, training + 35 * GIB, total)


@pytest.mark.parametrize(
    "setting",
    ["actor_rollout_ref.rollout.free_cache_engine=True", "actor_rollout_ref.actor.fsdp_config.param_offload=True"],
)
def test_it_goes_when_told_to_and_where_the_parameters_go_too(model: Path, setting: str) -> None:
    assert CacheRoom.beside_training(config_of(model, setting), CUDA) is None


def test_it_goes_on_a_cpu_and_for_a_model_that_the_plan_does_not_know(model: Path) -> None:
    assert CacheRoom.beside_training(config_of(model), torch.device("cpu")) is None
    (model / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    assert CacheRoom.beside_training(config_of(model), CUDA) is None
