"""Conversations over vLLM: the trainer's log-probs of every sampled token are the engine's."""

from __future__ import annotations

import pytest

from dovetail.rollout.vllm import VLLMEngine
from tests.agents.exactness import check_engine
from tests.models.tiny import tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("vllm")]


def test_turns_tools_branches_and_an_update(engines: dict[str, VLLMEngine]) -> None:
    engine = engines["llama_tied"]
    old, new = tiny_model("llama_tied"), tiny_model("llama_tied", seed=1)

    def update() -> None:
        engine.update_weights(new.named_parameters(), 1)

    engine.update_weights(old.named_parameters(), 0)
    try:
        check_engine(engine, {0: old, 1: new}, update, temperature=0.7, top_p=0.9)
    finally:
        engine.update_weights(old.named_parameters(), 0)
