"""The embedded engine on a real model, SmolLM2-135M-Instruct, in float32.

Greedy tokens could differ from transformers' at a tie only: two logits closer than what another shape of the same
matrix product rounds (about 1e-5 here). These prompts have none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.demo.smollm2 import smollm2_folder
from dovetail.models.load import load_tokenizer
from dovetail.rollout import GenerationRequest, SamplingParams
from dovetail.rollout.native.engine import NativeEngine
from tests.rollout.test_native_engine import plain_log_probs, transformers_greedy

# A real model: the tiny ones of `test_native_engine` show the same in `make test`.
pytestmark = [pytest.mark.engine, pytest.mark.slow]

QUESTIONS = (
    "What is the capital of France?",
    "Name three fruits.",
    "If I have 12 apples and eat 5, how many are left? Think step by step.",
    "Write a short poem about rain.",
    "Hi!",
)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_folder(torch.float32), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    tokenizer = load_tokenizer(smollm2_folder(torch.float32))
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for question in QUESTIONS
    ]


def test_greedy_tokens_equal_transformers_and_log_probs_a_plain_forward(model: Any, rows: list[list[int]]) -> None:
    sampling = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
    results = NativeEngine(model).generate([GenerationRequest(str(i), row, sampling) for i, row in enumerate(rows)])
    gaps = []
    for row, result in zip(rows, results, strict=True):
        assert result.token_ids == transformers_greedy(model, row, 16)
        gaps.append((torch.tensor(result.log_probs) - plain_log_probs(model, row, result.token_ids)).abs())
    assert torch.cat(gaps).mean() <= 1e-5


def test_samples_do_not_depend_on_the_batch(model: Any, rows: list[list[int]]) -> None:
    asked = [GenerationRequest(str(i), row, SamplingParams(seed=i, max_new_tokens=8)) for i, row in enumerate(rows)]
    engine = NativeEngine(model)
    together = engine.generate(asked)
    assert [engine.generate([request])[0].token_ids for request in asked] == [r.token_ids for r in together]
