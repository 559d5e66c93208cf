"""What the calls of a turn give back: all run, in order, at most so many at a time, and no longer than allowed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from dovetail.agents.types import ToolResult

logger = logging.getLogger(__name__)

_WARNED: set[str] = set()
Result = TypeVar("Result")
Call = TypeVar("Call")


def truncate_text(text: str, max_length: int, side: Literal["left", "middle", "right"]) -> str:
    """At most `max_length` characters of a tool's response, with "(truncated)" at the side where it was cut."""
    if len(text) <= max_length:
        return text
    if side == "left":
        return f"(truncated)...{text[len(text) - max_length :]}"
    if side == "right":
        return f"{text[:max_length]}...(truncated)"
    half = max_length // 2
    return f"{text[:half]}...(truncated)...{text[len(text) - half :]}"


def without_media(name: str, text: str, kinds: Sequence[str]) -> ToolResult:
    """A tool's text, and an error in the place of its images, sounds and the like: agents are text only."""
    if not kinds:
        return ToolResult(text)
    media = " and ".join(dict.fromkeys(kinds))
    if name not in _WARNED:
        _WARNED.add(name)
        logger.warning(
            "agents show text only: the model gets an error for the %s that the tool %s returned (said once; "
            "tool_call_counts/failed_share counts them)",
            media,
            name,
        )
    error = f"Error: the {media} that {name} returned cannot be shown; only text can."
    return ToolResult(f"{text}\n{error}" if text else error, failure="not shown")


async def run_calls(
    calls: Sequence[Call], run: Callable[[Call], Awaitable[Result]], *, max_parallel: int
) -> list[Result]:
    """`run` of each call, at most `max_parallel` at a time; the results are in the order of the calls.

    The first exception cancels the calls that still run, and is raised once they have ended.
    """
    places = asyncio.Semaphore(max_parallel)

    async def run_one(call: Call) -> Result:
        async with places:
            return await run(call)

    tasks = [asyncio.ensure_future(run_one(call)) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
