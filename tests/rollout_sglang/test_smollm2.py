"""SmolLM2-135M-Instruct on a real SGLang server, float32, against transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.demo.smollm2 import smollm2_folder
from dovetail.rollout.base import GenerationRequest, SamplingParams
from dovetail.rollout.sglang import SGLangRollout
from tests.ranks import run_alone
from tests.rollout_sglang.conftest import needs_sglang, small_settings
from tests.rollout_vllm.reference import greedy, log_probs, mean_gap

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), needs_sglang, pytest.mark.slow]

QUESTIONS = ["What is the capital of France?", "Write a haiku about rain.", "Who wrote Hamlet?"]


@dataclass(frozen=True)
class Compared:
    """What the server and transformers say under one version of the weights."""

    greedy: list[list[int]]
    wanted: list[list[int]]
    gap: float
    versions: set[int]


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    return run_alone(compare, timeout=800)


def compare(rank: int, world_size: int) -> list[Compared]:
    """Before and after an update."""
    folder = smollm2_folder(torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in QUESTIONS
    ]
    with SGLangRollout(small_settings(folder, max_model_len=512), num_servers=1, bucket_bytes=64 << 20) as engine:
        before = _ask_both(engine, model, prompts)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(1.02 if "mlp" in name else 1.0)
        engine.update_weights(model.named_parameters(), 1)
        return [before, _ask_both(engine, model, prompts)]


def _ask_both(engine: SGLangRollout, model: Any, prompts: list[list[int]]) -> Compared:
    most_likely = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
    drawn = SamplingParams(max_new_tokens=24, n=2, ignore_eos=True)
    results = engine.generate([GenerationRequest(str(n), p, most_likely) for n, p in enumerate(prompts)])
    sampled = engine.generate([GenerationRequest(str(n), p, drawn) for n, p in enumerate(prompts)])
    wanted = [log_probs(model, prompts[int(result.request_id)], result.token_ids) for result in sampled]
    return Compared(
        greedy=[result.token_ids for result in results],
        wanted=[greedy(model, prompt, 16) for prompt in prompts],
        gap=float(mean_gap(torch.cat(wanted), [score for result in sampled for score in result.log_probs])),
        versions={version for result in results + sampled for version in result.weight_versions},
    )


def test_tokens_and_log_probs_equal_those_of_transformers_before_and_after_an_update(compared: list[Compared]) -> None:
    assert len(compared) == 2
    for version, found in enumerate(compared):
        assert found.greedy == found.wanted
        assert found.gap <= 1e-5
        assert found.versions == {version}
