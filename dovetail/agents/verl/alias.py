"""`import verl...` in a user's file finds these names, where verl itself is not installed."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dovetail.agents.verl import agent_loop, bases, gsm8k


def _gsm8k_score(solution_str: str, ground_truth: Any, method: str = "strict", **scores: float) -> float:
    from dovetail.rewards.rules import gsm8k as rule

    return float(rule.compute_score(solution_str, ground_truth, method=method, **scores)["score"])  # type: ignore[arg-type]


def _default_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any) -> Any:
    from dovetail.rewards.registry import default_compute_score

    return default_compute_score(data_source, solution_str, ground_truth, extra_info)


_SCHEMAS = (
    "OpenAIFunctionPropertySchema", "OpenAIFunctionParametersSchema", "OpenAIFunctionSchema",
    "OpenAIFunctionToolSchema", "ToolResponse",
)  # fmt: skip
_LOOP = ("AgentLoopBase", "AgentLoopOutput", "register")
_OWN_LOOPS = {"SingleTurnAgentLoop": "single_turn_agent", "ToolAgentLoop": "tool_agent"}
NAMES: dict[str, dict[str, Any]] = {
    "verl.tools.base_tool": {name: getattr(bases, name) for name in ("BaseTool", *_SCHEMAS)},
    "verl.tools.schemas": {name: getattr(bases, name) for name in _SCHEMAS},
    "verl.tools.function_tool": {"function_tool": bases.function_tool},
    "verl.tools.gsm8k_tool": {"Gsm8kTool": gsm8k.Gsm8kTool},
    "verl.interactions.base": {"BaseInteraction": bases.BaseInteraction},
    "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": gsm8k.Gsm8kInteraction},
    "verl.experimental.agent_loop": {name: getattr(agent_loop, name) for name in _LOOP},
    "verl.experimental.agent_loop.agent_loop": {
        name: getattr(agent_loop, name) for name in (*_LOOP, "AgentLoopMetrics", "DictConfigWrap", "ToolListWrap")
    },
    "verl.experimental.agent_loop.tool_parser": {
        name: getattr(agent_loop, name) for name in ("FunctionCall", "ToolParser")
    },
    # Not here: subclasses of them change steps of verl's own loops. Their import says what to write instead.
    "verl.experimental.agent_loop.single_turn_agent_loop": {},
    "verl.experimental.agent_loop.tool_agent_loop": {},
    "verl.utils.profiler": {"simple_timer": agent_loop.simple_timer},
    "verl.workers.rollout.llm_server": {"LLMServerClient": agent_loop.LLMServerClient},
    "verl.workers.rollout.replica": {"TokenOutput": agent_loop.TokenOutput},
    "verl.utils.rollout_trace": {"rollout_trace_op": bases.rollout_trace_op},
    "verl.utils.reward_score": {"default_compute_score": _default_score},
    "verl.utils.reward_score.gsm8k": {"compute_score": _gsm8k_score},
}
"""What there is, by module. Everything else of verl is not here, and its import says so."""


def alias_verl() -> None:
    """Make the names importable. Does nothing where verl is installed, or the second time."""
    if "verl" in sys.modules or importlib.util.find_spec("verl") is not None:
        return
    for path, names in NAMES.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            _module(".".join(parts[:depth]))
        vars(sys.modules[path]).update(names)


def _module(path: str) -> None:
    if path in sys.modules:
        return
    module = ModuleType(path, "Stands in for verl: see docs/agents.md.")
    module.__spec__ = ModuleSpec(path, None, is_package=True)
    module.__path__ = []

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(sorted(NAMES.get(path, ()))) or "nothing"
        instead = "docs/agents.md has the list."
        if name in _OWN_LOOPS:
            instead = (
                f"{_OWN_LOOPS[name]} is a loop of dovetail's own, which cannot be subclassed: name it in agent_name, "
                "or write a subclass of AgentLoopBase."
            )
        raise ImportError(
            f"{path}.{name} is not here: verl is not installed, and dovetail stands in for it with {known} in {path}. "
            f"{instead}"
        )

    vars(module)["__getattr__"] = missing
    sys.modules[path] = module
    parent, _, name = path.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)
