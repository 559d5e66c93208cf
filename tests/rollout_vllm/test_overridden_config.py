"""Fields that `model.override_config` changes for the trainer are changed for the engines as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.models.load import load_config
from dovetail.rollout import get_engine_class
from dovetail.rollout.base import GenerationRequest, SamplingParams
from tests.rollout_vllm.reference import greedy, log_probs, mean_gap

pytestmark = pytest.mark.engine

CHANGED: dict[str, Any] = {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}
PROMPT = list(range(3, 203))
GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


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
