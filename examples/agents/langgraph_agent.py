"""A LangGraph agent, trained as it is: `agent.command="python langgraph_agent.py"`, or `run` as a loop.

Needs `pip install langgraph langchain-openai`. As a program it finds its address, key and task in the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import aiohttp
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from dovetail.agents.tools.calculator import calculator

MOST_STEPS = 12


@tool
def calculate(expression: str) -> str:
    """The value of an arithmetic expression."""
    return calculator(expression)


async def solve(messages: list[Any], truth: str, **address: Any) -> float:
    """Ask and use tools in turn until a message has no call; 1 if it has the right number.

    Without `address`, ChatOpenAI reads OPENAI_BASE_URL and OPENAI_API_KEY.
    """
    model = ChatOpenAI(model="policy", **address).bind_tools([calculate])

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    # Without the flag an expression that cannot be calculated would raise, and end the trajectory as `tool_error`.
    graph.add_node("tools", ToolNode([calculate], handle_tool_errors=True))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    state = await graph.compile().ainvoke({"messages": messages}, {"recursion_limit": MOST_STEPS})
    return float(truth in str(state["messages"][-1].content))


async def run(task: Any, base_url: str, api_key: str) -> float:
    truth = task.row["reward_model"]["ground_truth"]
    return await solve(task.messages, truth, base_url=base_url, api_key=api_key)


async def main() -> None:
    task = json.loads(os.environ["DOVETAIL_TASK"])
    reward = await solve(task["messages"], task["row"]["reward_model"]["ground_truth"])
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as client:
        await client.post(os.environ["DOVETAIL_FINISH_URL"], json={"reward": reward})


if __name__ == "__main__":
    asyncio.run(main())
