"""LoRA trained with SGLang: after every step its servers hold the merged weights and generate as the merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pyarrow", reason="training, which needs dovetail's own environment")

from dovetail.rollout.sglang import SGLangRollout
from dovetail.trainer.groups import create_groups
from dovetail.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.checksums import weight_checksum
from tests.models.tiny import tiny_model
from tests.rollout_sglang.conftest import needs_sglang
from tests.rollout_vllm.reference import greedy
from tests.trainer.test_separate_engines import prompts
from tests.workers.tiny_run import RESPONSE, rollout_batch, run_config, with_old_log_probs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.xdist_group("sglang"), needs_sglang]

R, M = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
NAMES = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"]


@pytest.fixture
def worker(engine: SGLangRollout, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> ActorRolloutRefWorker:
    """A policy with adapters of rank 4 in this process, in front of the servers that these tests share."""
    monkeypatch.setattr(SGLangRollout, "from_config", lambda *args, **kwargs: engine)
    monkeypatch.setattr(engine, "reload_weights", engine.reload_weights)  # the worker sets its own
    config = run_config(
        tiny_folder,
        {
            "trainer.n_gpus_per_node": 1,
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.actor.optim": {"lr": 3e-2, "eps": 1e-3},
            f"{M}.lora_rank": 4,
            f"{M}.lora_alpha": 12,
            f"{R}.name": "sglang",
            f"{R}.mode": "server",
            f"{R}.ignore_eos": True,
            f"{R}.free_cache_engine": False,  # the servers stay awake for the next test
        },
    )
    groups: Any = create_groups(config, use_ray=False, use_gpu=False)
    groups.actor_rollout.init_model()
    return groups.actor_rollout.worker


def test_merged_weights_reach_the_servers_after_every_step(
    engine: SGLangRollout, worker: ActorRolloutRefWorker
) -> None:
    request = prompts(n=1)
    request.meta_info["do_sample"] = False
    merged, before = tiny_model("llama_tied", seed=3), tiny_model("llama_tied").state_dict()
    responses = [worker.generate_sequences(request).tensors["responses"]]
    for _ in range(2):
        batch = rollout_batch()
        worker.update_actor(with_old_log_probs(batch, worker.compute_log_prob(batch).tensors["old_log_probs"]))
        assert worker.actor is not None
        weights = dict(worker.actor.backend.named_weights())
        merged.load_state_dict(weights, strict=False)  # without the tied head
        assert all(not torch.equal(weights[name], before[name]) for name in NAMES), "an adapter was merged into these"
        generated = worker.generate_sequences(request)
        ids = request.non_tensor_batch["raw_prompt_ids"]
        assert generated.tensors["responses"].tolist() == [greedy(merged, prompt, RESPONSE) for prompt in ids]
        assert engine.weight_checksums(NAMES) == weight_checksum(weights.items(), NAMES)
        # The trainer computes with its adapters beside the base: no merging is involved here.
        log_probs = worker.compute_log_prob(generated).tensors["old_log_probs"]
        torch.testing.assert_close(log_probs, generated.tensors["rollout_log_probs"], atol=1e-4, rtol=0)
        responses.append(generated.tensors["responses"])
        before = {name: tensor.clone() for name, tensor in weights.items()}
    assert not torch.equal(responses[0], responses[-1]), "two steps at this rate change what is generated"
