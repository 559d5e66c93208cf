"""Reward functions that behave, and some that do not."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from dovetail.rewards.functions import FunctionSpec


def spec_of(function: Callable[..., Any], *, weight: float = 1.0, **kwargs: Any) -> FunctionSpec:
    """Where another process finds one of these."""
    return FunctionSpec(f"pkg://{__name__}", function.__name__, kwargs, weight)


def length(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], scale: float = 1.0
) -> float:
    return scale * len(solution_str)


async def slow_judge(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, Any]:
    await asyncio.sleep(0.01)
    return {
        "score": 1.0 if solution_str == ground_truth else 0.0,
        "acc": solution_str == ground_truth,
        "judge": "async",
    }


def needs_truth(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    return float(float(solution_str) == float(ground_truth))


def by_column(response: str, level: int) -> float:
    return float(level)


def misbehave(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
    """Does what the answer says."""
    if solution_str == "sleep":
        print("going to sleep", flush=True)
        threading.Event().wait()
    if solution_str == "spawn":
        child = subprocess.Popen(["sleep", "3600"])
        with open(ground_truth, "w") as file:
            file.write(str(child.pid))
        threading.Event().wait()
    if solution_str == "segfault":
        ctypes.string_at(0)
    if solution_str == "exit":
        os._exit(7)
    if solution_str == "sys.exit":
        sys.exit(3)
    if solution_str == "raise":
        raise KeyError("the judge is unreachable")
    if solution_str == "lambda":
        return {"score": 1.0, "fn": lambda: 0}
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0"}.get(solution_str, 0.5)


def by_batch(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[Any], extra_infos: list[Any]
) -> list[Any]:
    return [{"score": float(len(text)), "rows": len(solution_strs)} for text in solution_strs]


def too_few(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[Any], extra_infos: list[Any]
) -> list[Any]:
    return [1.0]


def tells_extra_info(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    facts = {"final_response": extra_info["final_response"], "ended": extra_info["outcome"]}
    return {"score": float(len(extra_info["messages"])), "turns": int(extra_info["num_turns"]), **facts}


def wrong_signature(answer: str) -> float:
    return 0.0
