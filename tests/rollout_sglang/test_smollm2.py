"""SmolLM2-135M-Instruct on a real SGLang server, float32, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.models.smollm2 import smollm2_folder
from dovetail.rollout.base import GenerationRequest, SamplingParams
from dovetail.rollout.sglang import SGLangRollout
from tests.rollout_sglang.conftest import small_settings
from tests.rollout_vllm.reference import greedy, log_probs, mean_gap

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

QUESTIONS = ["What is the capital of France?", "Write a haiku about rain.", "Who wrote Hamlet?"]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_folder(torch.float32), dtype=torch.float32).eval()


def test_tokens_and_log_probs_equal_those_of_transformers_before_and_after_an_update(model: Any) -> None:
    folder = smollm2_folder(torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in QUESTIONS
    ]
    most_likely = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
    drawn = SamplingParams(max_new_tokens=24, n=2, ignore_eos=True)

    def compare(engine: SGLangRollout, version: int) -> None:
        results = engine.generate([GenerationRequest(str(n), p, most_likely) for n, p in enumerate(prompts)])
        assert [result.token_ids for result in results] == [greedy(model, prompt, 16) for prompt in prompts]
        sampled = engine.generate([GenerationRequest(str(n), p, drawn) for n, p in enumerate(prompts)])
        wanted = [log_probs(model, prompts[int(result.request_id)], result.token_ids) for result in sampled]
        gap = mean_gap(torch.cat(wanted), [score for result in sampled for score in result.log_probs])
        assert gap <= 1e-5
        assert {v for result in results + sampled for v in result.weight_versions} == {version}

    settings = small_settings(folder, max_model_len=512)
    with SGLangRollout(settings, num_servers=1, bucket_bytes=64 << 20) as engine:
        compare(engine, 0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(1.02 if "mlp" in name else 1.0)
        engine.update_weights(model.named_parameters(), 1)
        compare(engine, 1)
