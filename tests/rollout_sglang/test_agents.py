"""Conversations over SGLang's servers: the trainer's log-probs of every sampled token are the engine's."""

from __future__ import annotations

import pytest

from dovetail.rollout.sglang import SGLangRollout
from tests.agents.exactness import check_engine
from tests.models.tiny import tiny_model
from tests.rollout_sglang.conftest import needs_sglang

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.xdist_group("sglang"), needs_sglang]


def test_turns_tools_branches_and_an_update(engine: SGLangRollout) -> None:
    old, new = tiny_model("llama_tied"), tiny_model("llama_tied", seed=1)

    def update() -> None:
        engine.update_weights(new.named_parameters(), 1)

    engine.update_weights(old.named_parameters(), 0)
    check_engine(engine, {0: old, 1: new}, update, temperature=0.7, top_p=0.9)
