"""Fields that `model.override_config` changes for the trainer are changed for the engines as well."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.models.load import load_config
from dovetail.rollout import get_engine_class
from dovetail.rollout.base import GenerationRequest, RolloutEngine, SamplingParams
from dovetail.rollout.remote.engine import RemoteRollout
from dovetail.rollout.vllm.engine import VLLMEngine
from tests.rollout_vllm.reference import greedy, log_probs, mean_gap

CHANGED: dict[str, Any] = {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}
FEWER_LAYERS: dict[str, Any] = {"num_hidden_layers": 1}
PROMPT = list(range(3, 203))
GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


class Asked(Exception):
    """What an engine expects to be sent, instead of the engine."""


@pytest.mark.unit
@pytest.mark.parametrize("engine", [VLLMEngine, RemoteRollout])
def test_an_engine_expects_the_weights_of_the_changed_model(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, engine: type[RolloutEngine]
) -> None:
    monkeypatch.setattr("dovetail.rollout.vllm.environment._installed_version", lambda: "0.32.0")
    module = sys.modules[engine.__module__]
    real = vars(module)["expected_weights"]

    def ask(*args: Any, **kwargs: Any) -> None:
        raise Asked(real(*args, **kwargs))

    monkeypatch.setattr(module, "expected_weights", ask)
    name = "vllm" if engine is VLLMEngine else "sglang"
    urls = ["http://127.0.0.1:1"] if engine is RemoteRollout else []
    config = RolloutConfig(name=name, mode="server" if urls else "sync", server_urls=urls)
    with pytest.raises(Asked) as caught:
        engine.from_config(config, str(folders["llama"]), device=torch.device("cpu"), override_config=FEWER_LAYERS)
    (expected,) = caught.value.args
    assert {name.split(".")[2] for name in expected.shapes if ".layers." in name} == {"0"}


@pytest.mark.engine
def test_an_engine_with_fewer_layers_takes_the_weights_of_such_a_trainer(folders: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    folder = folders["llama"]
    trained = AutoModelForCausalLM.from_pretrained(
        folder, config=load_config(folder, FEWER_LAYERS), dtype=torch.float32
    ).eval()
    config = RolloutConfig(
        name="vllm",
        dtype="fp32",
        prompt_length=300,
        response_length=20,
        load_format="dummy",
        engine_kwargs={"vllm": {"kv_cache_memory_bytes": 64 << 20}},
    )
    build = get_engine_class("vllm").from_config
    with build(config, str(folder), device=torch.device("cpu"), override_config=FEWER_LAYERS) as engine:
        engine.update_weights(trained.named_parameters(), 1)
        (result,) = engine.generate([GenerationRequest("a", PROMPT, GREEDY)])
    assert result.token_ids == greedy(trained, PROMPT, 8)
    assert mean_gap(log_probs(trained, PROMPT, result.token_ids), result.log_probs) < 1e-4


@pytest.mark.engine
@pytest.mark.parametrize("name", ["native", "vllm"])
def test_an_engine_computes_with_the_changed_fields(folders: dict[str, Path], name: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = folders["llama"]
    config = RolloutConfig(
        name=name,
        dtype="fp32",
        prompt_length=300,
        response_length=20,
        load_format="auto",
        engine_kwargs={"vllm": {"kv_cache_memory_bytes": 64 << 20}},
    )
    as_it_is, changed = (
        AutoModelForCausalLM.from_pretrained(folder, config=load_config(folder, fields), dtype=torch.float32).eval()
        for fields in ({}, CHANGED)
    )
    build = get_engine_class(name).from_config
    with build(config, str(folder), device=torch.device("cpu"), override_config=CHANGED) as engine:
        (result,) = engine.generate([GenerationRequest("a", PROMPT, GREEDY)])
    assert result.token_ids == greedy(changed, PROMPT, 8)
    assert mean_gap(log_probs(changed, PROMPT, result.token_ids), result.log_probs) < 1e-4
    assert mean_gap(log_probs(as_it_is, PROMPT, result.token_ids), result.log_probs) > 1e-2, "the fields matter"
