"""Conversations of several turns, with tools and environments: next to the engine, without Ray."""

from dovetail.agents.environments import Environment, Step
from dovetail.agents.tools.functions import tool
from dovetail.agents.types import InfrastructureError, Task, ToolResult

__all__ = ["Environment", "InfrastructureError", "Step", "Task", "ToolResult", "tool"]
