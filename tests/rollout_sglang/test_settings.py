"""What is decided before SGLang starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.rollout.base import EngineError, GenerationRequest, SamplingParams
from dovetail.rollout.registry import get_engine_class
from dovetail.rollout.sglang import SGLangRollout, SGLangSettings
from dovetail.rollout.sglang.environment import PYTHON_VARIABLE, check_version, environment, server_python
from dovetail.rollout.sglang.expected import _expected_by_folder
from dovetail.rollout.sglang.samples import check_request, samples_of
from dovetail.rollout.sglang.weights import CheckedWeights
from dovetail.weight_sync import ExpectedWeights
from tests.models.tiny import save_tiny_model

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


@pytest.mark.parametrize("version", ["0.5.18", "0.5.23", "0.5.20.post1", "0.5.18+cu130"])
def test_supported_versions_pass(version: str) -> None:
    assert check_version(version) == version


@pytest.mark.parametrize("version", ["0.5.17", "0.5.24", "0.6.0", "0.4.99"])
def test_another_version_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(EngineError, match=f"SGLang {version} is installed.*0.5.18 to 0.5.23"):
        check_version(version)


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


@pytest.mark.parametrize(
    ("wanted", "has", "sampling", "ok"),
    [
        ("temperature", "temperature", {"temperature": 0.7, "top_p": 0.9}, True),
        ("processed", "temperature", {"temperature": 0.7}, True),
        ("processed", "temperature", {"top_p": 0.9}, False),
        ("raw", "temperature", {"top_p": 0.9}, True),
        ("raw", "temperature", {"temperature": 0.7}, False),
        ("raw", "temperature", {"temperature": 0.0, "top_k": 3}, True),
        ("temperature", "raw", {"top_k": 5}, True),
        ("temperature", "raw", {"temperature": 0.5}, False),
        ("processed", "raw", {}, True),
        ("processed", "raw", {"min_p": 0.1}, False),
    ],
)
def test_log_probs_that_the_engine_cannot_give_are_refused(wanted: str, has: str, sampling: dict, ok: bool) -> None:
    request = GenerationRequest("a", [5], SamplingParams(**sampling, logprobs=wanted))
    limits = {"max_model_len": 10, "vocab_size": 10, "deterministic": False}
    if ok:
        check_request(request, mode=has, **limits)
        return
    with pytest.raises(ValueError, match=f"logprobs='{wanted}'.*gives '{has}'"):
        check_request(request, mode=has, **limits)


def test_min_p_is_kept_from_the_seeded_sampler_that_dies_of_it() -> None:
    request = GenerationRequest("a", [5], SamplingParams(min_p=0.1))
    with pytest.raises(ValueError, match=r"min_p=0\.1.*dies of it"):
        check_request(request, max_model_len=10, vocab_size=10, mode="temperature", deterministic=True)


def test_no_name_of_a_sample_is_the_beginning_of_another() -> None:
    """SGLang aborts every request whose name begins with the one it is given."""
    request = GenerationRequest("a", [5], SamplingParams(n=12))
    names = [sample.rid for serial in range(12) for sample in samples_of(request, serial, eos_ids=(), room=5)]
    assert not any(one != other and other.startswith(one) for one in names for other in names)


def test_an_aborted_sample_that_ends_with_a_stop_token_is_complete() -> None:
    (sample,) = samples_of(GenerationRequest("a", [5], SamplingParams(max_new_tokens=9)), 0, eos_ids=(2,), room=99)
    meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [[-0.5, 7, None], [-0.25, 2, None]]}
    sample.absorb({"meta_info": meta}, 4)
    assert (sample.finish_reason, sample.token_ids, sample.versions) == ("stop", [7, 2], [4, 4])


def test_names_are_read_off_a_folder_where_no_trainer_runs(tmp_path: Path) -> None:
    tied = _expected_by_folder(save_tiny_model("llama_tied", tmp_path / "tied"))
    plain = _expected_by_folder(save_tiny_model("llama", tmp_path / "plain"))
    assert tied.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert plain.ties == {}
    assert tied.shapes == plain.shapes


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
