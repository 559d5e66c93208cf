"""What is decided before SGLang starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.rollout.base import EngineError
from dovetail.rollout.expected import CheckedWeights
from dovetail.rollout.registry import get_engine_class
from dovetail.rollout.sglang import SGLangRollout, SGLangSettings
from dovetail.rollout.sglang.environment import NEWEST, OLDEST, PYTHON_VARIABLE, environment, server_python
from dovetail.rollout.sglang.serve import is_supported
from dovetail.weight_sync import ExpectedWeights

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


@pytest.mark.parametrize("version", ["0.5.18", "0.5.23", "0.5.20.post1", "0.5.18+cu130"])
def test_supported_versions_pass(version: str) -> None:
    assert is_supported(version, list(OLDEST), list(NEWEST))


@pytest.mark.parametrize("version", ["0.5.17", "0.5.24", "0.6.0", "0.4.99", ""])
def test_another_version_is_refused(version: str) -> None:
    assert not is_supported(version, list(OLDEST), list(NEWEST))


def test_the_registry_finds_the_engine() -> None:
    assert get_engine_class("sglang") is SGLangRollout


def test_the_python_of_servers_is_configured_or_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    assert server_python(None) == sys.executable
    with pytest.raises(EngineError, match=r"sglang_python=/no/python .*\.venv-sglang"):
        server_python("/no/python")


def test_cuda_gets_no_cpu_variables() -> None:
    assert "SGLANG_USE_CPU_ENGINE" not in environment(cpu=False)
    assert environment(cpu=True)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in environment(cpu=False, raw_logprobs=True)


def test_the_config_maps_onto_settings() -> None:
    config = RolloutConfig(
        name="sglang",
        prompt_length=100,
        response_length=28,
        enable_prefix_caching=False,
        free_cache_engine=False,
        kv_cache_dtype="fp8",
        engine_kwargs={"sglang": {"attention_backend": "fa3", "schedule_policy": "lpm"}},
    )
    settings = SGLangSettings.from_config(
        config, "some/model", device=torch.device("cuda:3"), trust_remote_code=True, override_config={"rope_theta": 3}
    )
    arguments = settings.sglang_arguments(cpu=False)
    assert arguments["trust_remote_code"] is True
    assert json.loads(arguments["json_model_override_args"]) == {"rope_theta": 3}
    assert 128 < arguments["context_length"] <= 136  # SGLang keeps a few tokens free
    assert arguments["kv_cache_dtype"] == "fp8_e4m3"
    assert arguments["attention_backend"] == "fa3"
    assert arguments["schedule_policy"] == "lpm"
    assert arguments["disable_radix_cache"] is True
    assert arguments["enable_memory_saver"] is False
    assert arguments["base_gpu_id"] == 3
    assert arguments["load_format"] == "dummy"
    assert arguments["host"] == "127.0.0.1"


def test_cuda_leaves_the_attention_backend_to_sglang_unless_it_is_chosen() -> None:
    assert "attention_backend" not in SGLangSettings("m").sglang_arguments(cpu=False)
    assert SGLangSettings("m").sglang_arguments(cpu=True)["attention_backend"] == "torch_native"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (SGLangSettings("m", attention_backend="fa3"), "fa3 needs CUDA"),
        (SGLangSettings("m", attention_backend="intel_amx"), "garbage"),
        (SGLangSettings("m", deterministic=True), "needs CUDA"),
        (SGLangSettings("m", engine_kwargs={"port": 1}), "ports are bound"),
        (SGLangSettings("m", engine_kwargs={"dp_size": 2}), "rollout.num_servers"),
    ],
)
def test_what_cannot_work_on_cpu_is_refused_with_the_reason(settings: SGLangSettings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings.sglang_arguments(cpu=True)


def test_a_source_is_read_to_its_end_when_an_update_fails_half_way() -> None:
    taken: list[str] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abcd":
            taken.append(name)
            yield name, torch.zeros(2)

    checked = CheckedWeights(source(), ExpectedWeights(dict.fromkeys("abcd", (2,))))
    next(iter(checked))
    with pytest.raises(EngineError, match="SGLang died"), checked:
        raise EngineError("SGLang died")
    assert taken == list("abcd")
