"""What the OpenAI-compatible endpoint adds to a call: a conversation over HTTP against the same one without it.

  python benchmarks/agent_endpoint.py
  python benchmarks/agent_endpoint.py --turns 40 --sessions 20

The engine answers at once, so all that is measured is the endpoint: HTTP, matching the conversation, the chat template,
encoding, parsing. Times are CPU time of the process, in which client and server are: wall time on a quiet machine, and
comparable on a busy one. The client's own work counts, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp

from dovetail.agents.chat import ChatRenderer
from dovetail.agents.endpoint import Endpoint
from dovetail.agents.parsers import turn_parser
from dovetail.agents.session import Session, SessionSettings
from dovetail.models.load import load_tokenizer
from dovetail.rollout.base import GenerationRequest, GenerationResult, SamplingParams

_ANSWER = "I will look that up and tell you what I find.\n"
_RESULT = "The search found three pages. " * 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a tokenizer (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=10, help="calls of one session")
    args = parser.parse_args()
    if args.model is None:
        from dovetail.demo.smollm2 import smollm2_folder

        args.model = smollm2_folder()
    tokenizer = load_tokenizer(args.model)
    rows = {
        how: asyncio.run(_conversations(tokenizer, args.sessions, args.turns, over_http=over_http))
        for how, over_http in (("session.chat", False), ("endpoint", True))
    }
    print(f"{args.sessions} sessions of {args.turns} turns; milliseconds a call")
    for how, seconds in rows.items():
        p50, p90, p99 = (1000 * _quantile(seconds, share) for share in (0.5, 0.9, 0.99))
        print(f"  {how:<14} p50 {p50:6.2f}   p90 {p90:6.2f}   p99 {p99:6.2f}")
    added = 1000 * (_quantile(rows["endpoint"], 0.5) - _quantile(rows["session.chat"], 0.5))
    print(f"  the endpoint adds {added:.2f} ms (p50)")


async def _conversations(tokenizer: Any, num_sessions: int, turns: int, *, over_http: bool) -> list[float]:
    """Seconds of each call. The first session warms up and is not counted."""
    settings = SessionSettings(ChatRenderer(tokenizer), turn_parser("hermes", tokenizer), 4096, 1 << 20)
    call = {"name": "search", "arguments": {"query": "dovetail"}}
    text = f"{_ANSWER}<tool_call>\n{json.dumps(call)}\n</tool_call>"
    answer = [*tokenizer.encode(text, add_special_tokens=False), settings.renderer.stop_token_ids[0]]

    async def generate(request: GenerationRequest) -> GenerationResult:
        return GenerationResult(request.request_id, 0, answer, [-1.0] * len(answer), "stop", [0] * len(answer))

    seconds: list[float] = []
    async with aiohttp.ClientSession() as client:
        for number in range(num_sessions + 1):
            session = Session("benchmark", settings, generate, SamplingParams(seed=1))
            took = await (_over_http(session, client, turns) if over_http else _direct(session, turns))
            seconds += took if number else []
    return seconds


async def _direct(session: Session, turns: int) -> list[float]:
    messages: list[Any] = [{"role": "user", "content": "What is a dovetail?"}]
    seconds = []
    for _ in range(turns):
        began = time.process_time()
        turn = await session.chat(messages)
        seconds.append(time.process_time() - began)
        messages += [turn.message, {"role": "tool", "tool_call_id": turn.calls[0].id, "content": _RESULT}]
    return seconds


async def _over_http(session: Session, client: aiohttp.ClientSession, turns: int) -> list[float]:
    messages: list[Any] = [{"role": "user", "content": "What is a dovetail?"}]
    seconds = []
    async with Endpoint.of_loop().open(session) as opened:
        headers = {"Authorization": f"Bearer {opened.api_key}"}
        for _ in range(turns):
            began = time.process_time()
            body = {"model": "policy", "messages": messages}
            async with client.post(f"{opened.base_url}/chat/completions", json=body, headers=headers) as response:
                message = (await response.json())["choices"][0]["message"]
            seconds.append(time.process_time() - began)
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": _RESULT}
            messages += [message, result]
    assert len(session.segments()) == 1, "the conversation is append-only"
    return seconds


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    main()
