"""An agent that knows nothing of training: a graph of steps over OpenAI's client, as agent frameworks run them.

As a program, `python black_box.py`, it finds its address, key and task in the environment; `run` is the same as a loop.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import openai

from dovetail.agents.tools.calculator import calculator

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "The value of an arithmetic expression.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
MOST_STEPS = 6


async def ask(state: dict[str, Any]) -> str:
    """Let the model speak; where to go next depends on what it wants."""
    whole = await state["client"].chat.completions.create(model="policy", messages=state["messages"], tools=TOOLS)
    message = whole.choices[0].message
    state["messages"].append(message.model_dump(exclude_none=True))
    return "use_tools" if message.tool_calls else "end"


async def use_tools(state: dict[str, Any]) -> str:
    """Answer every call of the last message."""
    for call in state["messages"][-1]["tool_calls"]:
        try:
            result = calculator(json.loads(call["function"]["arguments"])["expression"])
        except (KeyError, ValueError) as error:
            result = f"Error: {error}"
        state["messages"].append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return "ask"


NODES = {"ask": ask, "use_tools": use_tools}


async def solve(messages: list[Any], truth: str, base_url: str, api_key: str) -> float:
    """Walk the graph from `ask` to its end; 1 if the last message has the right number."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        state = {"client": client, "messages": list(messages)}
        node = "ask"
        for _ in range(MOST_STEPS):
            node = await NODES[node](state)
            if node == "end":
                break
    return float(truth in str(state["messages"][-1].get("content")))


async def run(task: Any, base_url: str, api_key: str) -> float:
    return await solve(task.messages, task.row["reward_model"]["ground_truth"], base_url, api_key)


async def main() -> None:
    import aiohttp

    task, key = json.loads(os.environ["DOVETAIL_TASK"]), os.environ["OPENAI_API_KEY"]
    truth = task["row"]["reward_model"]["ground_truth"]
    reward = await solve(task["messages"], truth, os.environ["OPENAI_BASE_URL"], key)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client:
        await client.post(os.environ["DOVETAIL_FINISH_URL"], json={"reward": reward})


if __name__ == "__main__":
    asyncio.run(main())
