"""LoRA as an adapter: vLLM applies it over the base it has; the same tokens and log-probs as with merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.models.load import build_meta_model
from dovetail.models.lora import add_lora, is_lora_name
from dovetail.rollout.base import EngineError, GenerationRequest, SamplingParams, WeightUpdateError
from dovetail.rollout.vllm import VLLMEngine
from dovetail.trainer.groups import create_groups
from dovetail.weight_sync import LoraAdapter, write_peft_folder
from dovetail.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.rollout_vllm.conftest import small_settings
from tests.trainer.test_separate_engines import prompts
from tests.workers.tiny_run import rollout_batch, run_config, with_old_log_probs

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("vllm")]

R, M = "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def worker_of(folder: Path, *, merge: bool, adapter: Path) -> ActorRolloutRefWorker:
    """A policy with the adapters of a folder, of rank 4, in this process."""
    config = run_config(
        folder,
        {
            "trainer.n_gpus_per_node": 1,
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.actor.optim": {"lr": 3e-2, "eps": 1e-3},
            f"{M}.lora_rank": 4,
            f"{M}.lora_alpha": 12,
            f"{M}.lora_merge": merge,
            f"{M}.lora_adapter_path": str(adapter),
            f"{R}.name": "vllm",
            f"{R}.max_num_seqs": 16,
            f"{R}.verify_weights": True,
            f"{R}.engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 64 << 20}},
        },
    )
    torch.manual_seed(1)
    groups = create_groups(config, use_ray=False, use_gpu=False)
    groups.actor_rollout.init_model()
    built: Any = groups.actor_rollout
    return built.worker


def train_step(worker: ActorRolloutRefWorker) -> None:
    batch = rollout_batch()
    worker.update_actor(with_old_log_probs(batch, worker.compute_log_prob(batch).tensors["old_log_probs"]))


def save_adapter(model: Path, folder: Path) -> Path:
    """One that has learned something, for every linear layer."""
    shapes = add_lora(build_meta_model(model), rank=4, alpha=12).named_parameters()
    lora = ((name.replace(".default.", "."), tensor.shape) for name, tensor in shapes if is_lora_name(name))
    torch.manual_seed(2)
    write_peft_folder(LoraAdapter(4, 12, [(name, torch.randn(shape) * 0.05) for name, shape in lora]), folder)
    return folder


def test_an_adapter_gives_what_merged_weights_give_before_and_after_every_step(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    adapter = save_adapter(folders["llama"], tmp_path / "adapter")
    merged, apart = (worker_of(folders["llama"], merge=merge, adapter=adapter) for merge in (True, False))
    before = apart.generate_sequences(prompts()).tensors
    assert torch.equal(before["responses"], merged.generate_sequences(prompts()).tensors["responses"])
    assert apart.check_parity().mean_abs_diff <= 1e-5
    for _ in range(2):
        train_step(merged)
        train_step(apart)
        expected, found = (worker.generate_sequences(prompts()).tensors for worker in (merged, apart))
        assert torch.equal(found["responses"], expected["responses"])
        torch.testing.assert_close(found["rollout_log_probs"], expected["rollout_log_probs"], atol=1e-5, rtol=0)
        assert torch.equal(found["weight_version"], expected["weight_version"])
        assert apart.check_parity().mean_abs_diff <= 1e-5
    assert not torch.equal(found["responses"], before["responses"]), "two steps at this rate change what is written"
    for worker in (merged, apart):
        assert worker.hybrid is not None
        worker.hybrid.engine.close()


def test_an_adapter_that_does_not_fit_is_refused_by_name(folders: dict[str, Path]) -> None:
    kwargs = {"kv_cache_memory_bytes": 64 << 20, "enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    request = GenerationRequest("a", [3, 4, 5], SamplingParams(temperature=0, max_new_tokens=4))
    with VLLMEngine(small_settings(folders["llama"], engine_kwargs=kwargs)) as engine:
        wrong = [("model.layers.0.self_attn.nose_proj.lora_A.weight", torch.zeros(4, 128))]
        with pytest.raises(WeightUpdateError, match="nose_proj"):
            engine.update_adapter(LoraAdapter(4, 8, wrong), 1)
        with pytest.raises(EngineError, match="adapter to version 1 did not finish"):
            engine.generate([request])


def test_an_engine_without_room_for_adapters_says_so(engines: dict[str, VLLMEngine]) -> None:
    with pytest.raises(EngineError, match="enable_lora"):
        engines["llama"].update_adapter(LoraAdapter(4, 8, []), 1)
    engines["llama"]._partial_update = ""
