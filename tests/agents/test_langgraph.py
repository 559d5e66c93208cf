"""The LangGraph example with the real packages: as a function, and as a program that asks the embedded engine."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from dovetail.agents.calls import CallSettings
from dovetail.agents.chat import ChatRenderer
from dovetail.agents.endpoint import command_agent
from dovetail.agents.loops import as_loop, find_object
from dovetail.agents.parsers import turn_parser
from dovetail.agents.runner import Deadline, run_trajectory
from dovetail.agents.session import Session, SessionSettings
from dovetail.agents.tools.functions import FunctionToolbox
from dovetail.agents.types import Segment, Task, Trajectory
from dovetail.rollout.base import GenerationRequest, GenerationResult, SamplingParams
from dovetail.rollout.native.engine import NativeEngine
from tests.agents.test_endpoint import ScriptedEngine, check_rows
from tests.agents.tokenizers import family_tokenizer
from tests.models.tiny import tiny_model
from tests.rollout.test_native_engine import plain_log_probs

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("langgraph", "langchain_openai")),
        reason="LangGraph is not installed: pip install langgraph langchain-openai",
    ),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "langgraph_agent.py"
TASK = Task([{"role": "user", "content": "6*7?"}], {"reward_model": {"ground_truth": "42"}}, uid="u")


def call_of(expression: str) -> str:
    call = {"name": "calculate", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def run(loop: Any, session: Session) -> Trajectory:
    return asyncio.run(run_trajectory(TASK, loop, session, FunctionToolbox([]), CallSettings(), Deadline(600.0)))


def run_scripted(loop: Any, *texts: str) -> Trajectory:
    engine = ScriptedEngine(*texts)
    session = engine.session()
    trajectory = run(as_loop(loop), session)
    check_rows(session, engine)
    return trajectory


def results_of(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "tool"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_graph_reads_what_a_call_that_fails_says_and_stays_in_one_row(streaming: bool) -> None:
    solve = find_object(f"{EXAMPLE}:solve", key="agent_name")

    async def loop(task: Task, base_url: str, api_key: str) -> float:
        return await solve(task.messages, "42", base_url=base_url, api_key=api_key, streaming=streaming)

    trajectory = run_scripted(loop, call_of("6*"), call_of("6*7"), "It is 42.")
    assert (trajectory.outcome, trajectory.reward, len(trajectory.segments)) == ("finished", 1.0, 1)
    failed, result = results_of(trajectory)
    assert failed.startswith("Error: ")
    assert result == "42"


def taught(row: Segment, vocab_size: int) -> Any:
    """A tiny model that has learned the sampled tokens of one row by heart."""
    torch.manual_seed(0)
    model = tiny_model("llama", vocab_size=vocab_size, max_position_embeddings=2048)
    ids = torch.tensor([[*row.prompt_ids, *row.response.token_ids]])
    sampled = torch.tensor([False] * len(row.prompt_ids) + list(row.response.sampled))[1:]
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(200):
        loss = cross_entropy(model(ids).logits[0, :-1][sampled], ids[0, 1:][sampled])
        if loss < 5e-3:
            return model.eval()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the model has not learned its row: loss {loss:.3f}")


def test_a_program_calls_its_tool_posts_its_reward_and_its_tokens_have_the_engines_log_probs() -> None:
    function = find_object(f"{EXAMPLE}:run", key="agent_name")
    (lesson,) = run_scripted(function, call_of("6*7"), "It is 42.").segments
    tokenizer = family_tokenizer("qwen2.5")
    model = taught(lesson, len(tokenizer))
    engine, generated = NativeEngine(model), list[GenerationResult]()

    async def generate(request: GenerationRequest) -> GenerationResult:
        generated.extend(await asyncio.to_thread(engine.generate, [request]))
        return generated[-1]

    renderer = ChatRenderer(tokenizer)
    settings = SessionSettings(renderer, turn_parser("hermes", tokenizer), 600, 300)
    sampling = SamplingParams(seed=1, temperature=0.5, stop_token_ids=renderer.stop_token_ids)
    session = Session("s", settings, generate, sampling)
    trajectory = run(command_agent(f"{sys.executable} {EXAMPLE}"), session)
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == ("finished", 1.0, "")
    assert results_of(trajectory) == ["42"]
    (row,) = trajectory.segments
    sampled = torch.tensor(row.response.sampled)
    log_probs = torch.tensor(row.response.log_probs)[sampled]
    assert torch.tensor(row.response.token_ids)[sampled].tolist() == [id for one in generated for id in one.token_ids]
    assert log_probs.tolist() == torch.tensor([each for one in generated for each in one.log_probs]).tolist()
    plain = plain_log_probs(model, list(row.prompt_ids), list(row.response.token_ids), temperature=0.5)
    assert (log_probs - plain[sampled]).abs().max() <= 1e-5
