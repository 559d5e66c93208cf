"""A model whose code lies in its folder: trainer and engine run it when trusted to, and refuse it otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.rollout import RolloutConfig
from dovetail.models.errors import ModelError
from dovetail.rollout.vllm.settings import VLLMSettings
from dovetail.workers import hybrid_engine, rollout_worker
from dovetail.workers.actor_rollout_ref import ActorRolloutRefWorker
from dovetail.workers.rollout_worker import RolloutWorker
from tests.workers.tiny_run import run_config, small_model

pytestmark = pytest.mark.engine

CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM


class OwnConfig(Qwen2Config):
    model_type = "dovetail_own"


class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig
"""
REGISTER = """
from transformers import AutoConfig, AutoModelForCausalLM

AutoConfig.register("dovetail_registered", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
"""
TRUST = {"actor_rollout_ref.model.trust_remote_code": True}
# Another dtype than the trainer's: the engine reads the folder instead of sharing the trainer's weights.
APART = {"actor_rollout_ref.rollout.dtype": "bfloat16"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = small_model(tmp_path / "model")
    (folder / "modeling_own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "dovetail_own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_engine_of_a_trusted_model_agrees_with_the_trainer(folder: Path) -> None:
    worker = ActorRolloutRefWorker(run_config(folder, TRUST | APART), role="actor_rollout")
    worker.init_model()  # proves that engine and trainer agree
    assert worker.hybrid is not None
    assert not worker.hybrid.shares_weights


def test_a_model_that_is_not_trusted_is_refused_without_asking(folder: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        ActorRolloutRefWorker(run_config(folder, APART), role="actor_rollout").init_model()


def test_a_module_that_registers_the_model_is_imported_by_a_worker_that_only_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `hybrid_engine=False` no trainer in that process imports it."""
    folder = small_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    architecture = {"model_type": "dovetail_registered", "architectures": ["OwnForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | architecture))
    code = CODE.replace("dovetail_own", "dovetail_registered") + REGISTER
    (tmp_path / "dovetail_test_registers.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match="dovetail_registered"):
        RolloutWorker(run_config(folder)).init_model()
    lib = {"actor_rollout_ref.model.external_lib": "dovetail_test_registers"}
    RolloutWorker(run_config(folder, lib)).init_model()


def test_an_engine_in_a_process_of_its_own_knows_the_module(tmp_path: Path) -> None:
    settings = VLLMSettings.from_config(RolloutConfig(), tmp_path, external_lib="mine")
    assert settings.model_args.get("external_lib") == "mine"
    assert "external_lib" not in settings.vllm_arguments(cpu=True)


@pytest.mark.parametrize("trusted", [True, False])
def test_every_engine_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool) -> None:
    told: list[bool] = []

    class Asked(Exception):
        pass

    class Engine:
        @classmethod
        def from_config(cls, *args: Any, trust_remote_code: bool, **options: Any) -> None:
            told.append(trust_remote_code)
            raise Asked

    config = run_config(small_model(folder.parent / "plain"), {"actor_rollout_ref.model.trust_remote_code": trusted})
    for module, worker in (
        (hybrid_engine, ActorRolloutRefWorker(config, role="actor_rollout")),
        (rollout_worker, RolloutWorker(config)),
    ):
        monkeypatch.setattr(module, "engine_class_for", lambda rollout: Engine)
        with pytest.raises(Asked):
            worker.init_model()
    assert told == [trusted, trusted]
