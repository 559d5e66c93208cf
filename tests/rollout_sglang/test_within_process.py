"""SGLang inside the trainer's process must not take the process over, and its death must not end it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess

import pytest
import torch

from dovetail.rollout.base import EngineError, GenerationRequest, SamplingParams
from dovetail.rollout.sglang import SGLangRollout
from dovetail.rollout.sglang.in_process import InProcessLink
from tests.rollout_sglang.conftest import Running, needs_sglang_in_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.xdist_group("sglang"), needs_sglang_in_process]

LONG = SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True)


def test_generating_leaves_the_trainers_process_as_it_was(engine: SGLangRollout) -> None:
    torch.manual_seed(21)
    expected = torch.rand(3)
    torch.manual_seed(21)
    engine.generate([GenerationRequest("a", [5, 6], SamplingParams(max_new_tokens=8))])
    assert torch.equal(torch.rand(3), expected)
    assert "uvloop" not in type(asyncio.get_event_loop_policy()).__module__
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    assert not any("SGLang" in str(handler.formatter) for handler in logging.getLogger().handlers)


def test_it_is_started_on_the_main_thread_only(engine: SGLangRollout) -> None:
    async def build() -> None:
        InProcessLink(engine.settings, cpu=True)

    with pytest.raises(EngineError, match="main thread only"):
        engine._loop.run(build())


def test_a_killed_scheduler_is_reported_and_nothing_else_dies(engine: SGLangRollout) -> None:
    other = subprocess.Popen(["sleep", "300"])
    link = engine._core.links[0]
    assert isinstance(link, InProcessLink)
    running = Running(engine, [GenerationRequest("lost", [7], LONG)])
    running.paused_after(1)
    engine.continue_()
    os.kill(link._pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"process .* of SGLang died"):
        running.join(60)
    assert not engine.health().ok
    with pytest.raises(EngineError, match="died"):
        engine.generate([GenerationRequest("a", [7], LONG)])
    engine.close()
    # SGLang's own shutdown would have killed every child of this process.
    assert other.poll() is None
    other.kill()
    other.wait()
