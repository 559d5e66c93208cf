"""What `dovetail export` writes of a trained policy is a model that vLLM loads and answers with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.cli.main import main
from dovetail.rollout.base import GenerationRequest, SamplingParams
from dovetail.rollout.vllm import VLLMEngine
from tests.models.tiny import save_tiny_model
from tests.rollout_vllm.conftest import small_settings
from tests.rollout_vllm.reference import greedy, log_probs
from tests.trainer.toy_run import Toy, save_toy_data, train

pytestmark = pytest.mark.engine


def test_vllm_answers_with_an_exported_policy_as_transformers_does(tmp_path: Path) -> None:
    toy = Toy(save_tiny_model("llama_tied", tmp_path / "model"), save_toy_data(tmp_path / "data", count=12))
    keys = {"trainer.save_freq": 3, "actor_rollout_ref.actor.optim.lr": 1e-2}
    train(toy.config(tmp_path / "run", keys))
    out = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    before = AutoModelForCausalLM.from_pretrained(toy.model, dtype=torch.float32).eval()
    prompts = [[5, 9, 30, 41], [7, 7, 60, 12, 90, 33]]
    engine = VLLMEngine(small_settings(out, max_model_len=64))
    asked = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    try:
        found = engine.generate([GenerationRequest(str(n), prompt, asked) for n, prompt in enumerate(prompts)])
    finally:
        engine.close()
    for prompt, answer in zip(prompts, found, strict=True):
        assert answer.token_ids == greedy(model, prompt, 12)
        scores = torch.tensor(answer.log_probs)
        torch.testing.assert_close(scores, log_probs(model, prompt, answer.token_ids), atol=1e-4, rtol=0)
        # The trained model, not the one it began as.
        assert not torch.allclose(scores, log_probs(before, prompt, answer.token_ids), atol=1e-3)
