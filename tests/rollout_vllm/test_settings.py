"""What is decided before vLLM starts."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.models.load import build_meta_model
from dovetail.rollout.base import EngineError, SamplingParams
from dovetail.rollout.expected import expected_weights
from dovetail.rollout.registry import get_engine_class
from dovetail.rollout.request_rules import check_logprobs
from dovetail.rollout.vllm import VLLMEngine, VLLMSettings, lifetime, vLLMRollout
from dovetail.rollout.vllm.environment import check_version, environment, prepare
from tests.models.tiny import save_tiny_model, tiny_config

pytestmark = pytest.mark.unit
VLLM_MODULES = (
    *("vllm", "vllm.engine", "vllm.engine.arg_utils", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.llm_engine"),
    "vllm.v1.executor",
)


def test_a_start_that_fails_leaves_the_trainer_its_random_state_precision_and_process_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def engine_args(**arguments: Any) -> None:
        random.seed(0)
        np.random.seed(0)
        torch.set_float32_matmul_precision("medium")
        raise RuntimeError("no memory for the KV cache")

    modules: dict[str, Any] = {name: ModuleType(name) for name in VLLM_MODULES}
    modules["vllm.engine.arg_utils"].EngineArgs = engine_args
    modules["vllm.v1.engine.llm_engine"].LLMEngine = modules["vllm.v1.executor"].Executor = None
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(lifetime, "_process", lifetime._Process())  # engines of other tests may run in this process
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError, match="no memory"):
        lifetime.start_engine(VLLMSettings(model="m"), cpu=True)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_float32_matmul_precision()) == before
    assert not lifetime._process.groups_are_vllms, "a process group that is made from now on is the trainer's"


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.29.1+cu130"])
def test_supported_versions_pass(version: str) -> None:
    assert check_version(version) == version


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "1.0.0"])
def test_another_version_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(EngineError, match=f"vLLM {version} is installed.*0.26 to 0.32"):
        check_version(version)


def test_environment_variables_are_set_only_where_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.rollout.vllm.environment._installed_version", lambda: "0.32.0")
    for name in environment(cpu=True):
        monkeypatch.setenv(name, "restored at the end")
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    prepare(cpu=True)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert os.environ["VLLM_HOST_IP"] == "127.0.0.1"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_cuda_gets_no_cpu_variables_and_a_trainers_process_may_go_on_compiling() -> None:
    assert "VLLM_HOST_IP" not in environment(cpu=False)
    assert "TORCHDYNAMO_DISABLE" not in environment(cpu=True)
    assert environment(cpu=True, own_process=True)["TORCHDYNAMO_DISABLE"] == "1"


@pytest.mark.parametrize("installed", [True, False])
def test_flashinfer_samples_on_cuda_only_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    assert ("VLLM_USE_FLASHINFER_SAMPLER" not in environment(cpu=False)) == installed
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in environment(cpu=True)


@pytest.mark.parametrize(
    ("wanted", "has", "sampling", "ok"),
    [
        ("temperature", "temperature", {"temperature": 0.7, "top_p": 0.9}, True),
        ("processed", "temperature", {"temperature": 0.7}, True),
        ("processed", "temperature", {"top_p": 0.9}, False),
        ("raw", "temperature", {"top_p": 0.9}, True),
        ("raw", "temperature", {"temperature": 0.7}, False),
        ("raw", "temperature", {"temperature": 0.0, "top_k": 3}, True),
        ("temperature", "processed", {"temperature": 0.7}, True),
        ("temperature", "processed", {"top_k": 5}, False),
        ("temperature", "raw", {"top_k": 5}, True),
        ("temperature", "raw", {"temperature": 0.5}, False),
        ("processed", "raw", {}, True),
        ("processed", "raw", {"min_p": 0.1}, False),
    ],
)
def test_log_probs_that_the_engine_cannot_give_are_refused(wanted: str, has: str, sampling: dict, ok: bool) -> None:
    params = SamplingParams(**sampling, logprobs=wanted)
    if ok:
        check_logprobs(params, has, "this engine")
        return
    with pytest.raises(ValueError, match=f"logprobs='{wanted}'.*gives '{has}'"):
        check_logprobs(params, has, "this engine")


def test_engine_kwargs_reach_vllm_and_win() -> None:
    settings = VLLMSettings("m", max_num_seqs=64, engine_kwargs={"max_num_seqs": 8, "swap": 1})
    arguments = settings.vllm_arguments(cpu=True)
    assert arguments["max_num_seqs"] == 8
    assert arguments["swap"] == 1
    assert arguments["enforce_eager"] is True


def test_on_a_cpu_no_prompt_is_cut_into_steps() -> None:
    short = VLLMSettings("m", max_model_len=100, max_num_batched_tokens=4096).vllm_arguments(cpu=True)
    assert (short["enable_chunked_prefill"], short["max_num_batched_tokens"]) == (False, 4096)
    long = VLLMSettings("m", max_model_len=9000, max_num_batched_tokens=4096).vllm_arguments(cpu=True)
    assert (long["enable_chunked_prefill"], long["max_num_batched_tokens"]) == (False, 9000)
    assert "max_num_batched_tokens" not in VLLMSettings("m", max_num_batched_tokens=4096).vllm_arguments(cpu=True)
    assert VLLMSettings("m").vllm_arguments(cpu=False)["enable_chunked_prefill"] is True


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({"max_num_seqs": 1024}, 1024),
        ({"max_num_seqs": 512}, None),  # vLLM's own graphs reach that far
        ({"max_num_seqs": 1024, "enforce_eager": True}, None),
        ({"max_num_seqs": 1024, "engine_kwargs": {"max_cudagraph_capture_size": 64}}, 64),
        ({"max_num_seqs": 1024, "engine_kwargs": {"cudagraph_capture_sizes": [1, 8]}}, None),
        ({"max_num_seqs": 1024, "engine_kwargs": {"compilation_config": {"mode": 0}}}, None),
    ],
)
def test_the_largest_batch_is_captured_unless_the_sizes_are_chosen(given: dict[str, Any], size: int | None) -> None:
    assert VLLMSettings("m", **given).vllm_arguments(cpu=False).get("max_cudagraph_capture_size") == size
    assert VLLMSettings("m", max_num_seqs=1024).vllm_arguments(cpu=True).get("max_cudagraph_capture_size") is None


@pytest.mark.parametrize("name", ["worker_extension_cls", "logprobs_mode"])
def test_engine_kwargs_that_the_adapter_needs_itself_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"engine_kwargs.vllm.{name} cannot be set"):
        VLLMSettings("m", engine_kwargs={name: "x"}).vllm_arguments(cpu=True)


def test_the_config_maps_onto_settings() -> None:
    config = RolloutConfig(
        name="vllm",
        prompt_length=100,
        response_length=28,
        tensor_model_parallel_size=2,
        free_cache_engine=False,
        kv_cache_dtype="fp8",
        mm_processor_kwargs={"max_pixels": 3136},
        engine_kwargs={"vllm": {"block_size": 32}},
    )
    settings = VLLMSettings.from_config(config, "some/model")
    assert settings.vllm_arguments(cpu=False)["mm_processor_kwargs"] == {"max_pixels": 3136}
    assert settings.max_model_len == 128
    assert settings.tensor_parallel_size == 2
    assert settings.logprobs == "temperature"
    assert settings.load_format == "dummy"
    assert settings.vllm_arguments(cpu=False)["enable_sleep_mode"] is False
    assert settings.vllm_arguments(cpu=False)["block_size"] == 32
    assert settings.vllm_arguments(cpu=False)["kv_cache_dtype"] == "fp8"


@pytest.mark.parametrize(
    ("keys", "argument", "value"),
    [
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill", False),
        ({"enable_prefix_caching": False}, "enable_prefix_caching", False),
        ({"max_num_batched_tokens": 999}, "max_num_batched_tokens", 999),
        ({"gpu_memory_utilization": 0.3}, "gpu_memory_utilization", 0.3),
        ({"enforce_eager": True}, "enforce_eager", True),
        ({"cudagraph_capture_sizes": [1, 8]}, "cudagraph_capture_sizes", [1, 8]),
        ({"limit_images": 3}, "limit_mm_per_prompt", {"image": 3}),
        ({"expert_parallel_size": 2}, "enable_expert_parallel", True),
        ({"scheduling_policy": "priority"}, "scheduling_policy", "priority"),
        ({"disable_log_stats": False}, "disable_log_stats", False),
        ({"skip_tokenizer_init": False}, "skip_tokenizer_init", False),
        ({"load_format": "safetensors"}, "load_format", "safetensors"),
        ({"dtype": "fp16"}, "dtype", "float16"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode", "raw_logprobs"),
    ],
)
def test_a_key_of_the_engine_reaches_vllm(keys: dict[str, Any], argument: str, value: Any) -> None:
    def arguments(**keys: Any) -> dict[str, Any]:
        config = RolloutConfig(name="vllm", max_num_seqs=8, **keys)
        return VLLMSettings.from_config(config, "some/model").vllm_arguments(cpu=False)

    assert arguments(**keys)[argument] == value
    assert arguments().get(argument) != value, "it is the key that does it"


def test_code_of_the_model_runs_in_vllm_when_it_is_trusted() -> None:
    config = RolloutConfig(name="vllm")
    for trust in (True, False):
        settings = VLLMSettings.from_config(config, "some/model", trust_remote_code=trust)
        assert settings.vllm_arguments(cpu=False)["trust_remote_code"] is trust


def test_the_registry_finds_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # whether vLLM is installed is not asked here
    assert get_engine_class("vllm") is vLLMRollout is VLLMEngine


def test_a_tied_head_is_expected_under_either_name(tmp_path: Path) -> None:
    tied = expected_weights(save_tiny_model("llama_tied", tmp_path / "tied"))
    plain = expected_weights(save_tiny_model("llama", tmp_path / "plain"))
    assert tied.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert plain.ties == {}
    assert tied.shapes == plain.shapes


@pytest.mark.parametrize(
    "changed", [{"num_hidden_layers": 1}, {"vocab_size": 300}, {"tie_word_embeddings": True}], ids=str
)
def test_the_expected_weights_are_those_of_the_model_that_the_trainer_builds(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    folder = save_tiny_model("llama", tmp_path)
    trained = build_meta_model(folder, "policy", override_config=changed)
    found = expected_weights(folder, override_config=changed)
    names = {name: tuple(weight.shape) for name, weight in trained.named_parameters(remove_duplicate=False)}
    assert found.shapes == names
    assert found != expected_weights(folder), "the field matters"


def test_overridden_fields_reach_vllm_unless_its_own_arguments_name_others() -> None:
    changed = {"num_hidden_layers": 1}
    settings = VLLMSettings.from_config(RolloutConfig(name="vllm"), "some/model", override_config=changed)
    assert settings.override_config == changed
    assert settings.vllm_arguments(cpu=True)["hf_overrides"] == changed
    own = RolloutConfig(name="vllm", engine_kwargs={"vllm": {"hf_overrides": {"rope_theta": 1}}})
    settings = VLLMSettings.from_config(own, "some/model", override_config=changed)
    assert settings.vllm_arguments(cpu=True)["hf_overrides"] == {"rope_theta": 1}
    assert "hf_overrides" not in VLLMSettings("some/model").vllm_arguments(cpu=True)


def test_experts_are_expected_under_their_names_on_disk(tmp_path: Path) -> None:
    names = expected_weights(save_tiny_model("qwen3_moe", tmp_path)).shapes
    assert names["model.layers.0.mlp.experts.3.down_proj.weight"] == (128, 48)


def test_a_model_that_sees_images_gets_a_tokenizer_and_its_own_weights(tmp_path: Path) -> None:
    """vLLM reads images with a tokenizer, and dummy weights would overwrite what scales its pixels."""
    asked = {"load_format": "dummy", "skip_tokenizer_init": True}
    found = {}
    for family in ("qwen2_5_vl", "qwen2"):
        tiny_config(family).save_pretrained(tmp_path / family)
        arguments = VLLMSettings(str(tmp_path / family), **asked).vllm_arguments(cpu=True)
        found[family] = {name: arguments[name] for name in asked}
    assert found == {"qwen2_5_vl": {"load_format": "auto", "skip_tokenizer_init": False}, "qwen2": asked}
