"""Toolboxes from what a run's configuration names: verl's YAML files, Python files and classes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dovetail.agents.environments import Environment, Environments
from dovetail.agents.loops import find_object
from dovetail.agents.tools.classes import ClassToolbox, read_methods
from dovetail.agents.tools.combine import combine
from dovetail.agents.tools.functions import FunctionToolbox, is_tool
from dovetail.agents.tools.schema import ToolError
from dovetail.agents.types import Toolbox
from dovetail.config.user_code import load_user_object
from dovetail.data.tool_files import KEY, read_tool_file

_BUILT_IN = {
    "calculator": "dovetail.agents.tools.calculator.calculator",
    "python": "dovetail.agents.tools.python.PythonToolbox",
    "search": "dovetail.agents.tools.search.SearchToolbox",
}


def load_toolbox(
    *,
    tool_config_path: str | None = None,
    function_tool_path: str | None = None,
    interaction_config_path: str | None = None,
    environment: str | None = None,
    mcp_servers: Mapping[str, Any] | None = None,
) -> Toolbox | None:
    """All tools, the simulated users and the environment of a run as one toolbox; None where there are none.

    `environment` is `file.py:Class` or `package.module.Class`: an `Environment`, or a class whose methods are tools.
    """
    toolboxes: list[Toolbox] = []
    if tool_config_path:
        toolboxes += load_tool_file(tool_config_path)
    if function_tool_path:
        toolboxes.append(load_functions(function_tool_path))
    if interaction_config_path:
        toolboxes.append(load_interactions(interaction_config_path))
    if environment:
        toolboxes.append(toolbox_of(find_object(environment, key="agent.environment"), {}, None))
    if mcp_servers:
        from dovetail.agents.tools.mcp import McpToolbox

        toolboxes.append(McpToolbox(mcp_servers))
    return combine(toolboxes) if toolboxes else None


def load_tool_file(path: str) -> list[Toolbox]:
    """A toolbox for each entry of verl's YAML. `class_name` may also name a function, a class or a tool of ours."""
    toolboxes = []
    for entry in read_tool_file(path):
        config = dict(entry.get("config") or {})
        if config.get("type") == "mcp" or "mcp" in entry:
            toolboxes.append(_mcp(entry.get("mcp") or {}, path))
            continue
        name = entry.get("class_name")
        if not name:
            raise ToolError(f"{KEY}={path}: a tool has a schema but no class_name, so nothing can be called.")
        config.pop("type", None)
        if name.startswith("verl.tools.sandbox_fusion_tools."):
            toolboxes.append(_sandbox_fusion(config, entry.get("tool_schema")))
            continue
        target = find_object(_BUILT_IN.get(name, name), key=KEY)
        toolboxes.append(toolbox_of(target, config, entry.get("tool_schema")))
    return toolboxes


def toolbox_of(target: Any, config: dict[str, Any], schema: dict[str, Any] | None) -> Toolbox:
    """Whatever a user may write as a tool, as a toolbox."""
    if isinstance(target, type):
        if hasattr(target, "execute"):
            return _verl_tool(target, config, schema)
        if hasattr(target, "open"):
            return target(**config)
        make = functools.partial(target, **config)
        return Environments(make) if issubclass(target, Environment) else ClassToolbox(make, read_methods(target))
    if callable(target):
        return FunctionToolbox([target])
    raise ToolError(f"{target!r} is no tool; give a function, an Environment, or a class whose methods are tools.")


def load_functions(path: str) -> Toolbox:
    """The functions of a file that are marked with `@tool`, or with verl's `@function_tool`."""
    from dovetail.agents.verl.adapters import as_result
    from dovetail.agents.verl.alias import alias_verl
    from dovetail.agents.verl.bases import FUNCTION_TOOL

    alias_verl()
    functions: list[Callable[..., Any]] = []
    names = load_user_object(path, "__dict__", key="multi_turn.function_tool_path")
    for value in {id(value): value for value in names.values()}.values():  # one that has two names is one tool
        if (signature := getattr(value, FUNCTION_TOOL, None)) is not None:
            functions.append(_converted(value, signature, as_result))
        elif is_tool(value):
            functions.append(value)
    if not functions:
        raise ToolError(f"multi_turn.function_tool_path={path} has no function marked with @tool or @function_tool.")
    return FunctionToolbox(functions)


def load_interactions(path: str) -> Toolbox:
    """The simulated users of verl's YAML."""
    import yaml

    from dovetail.agents.verl.adapters import InteractionToolbox

    key = "multi_turn.interaction_config_path"
    if not (file := Path(path).expanduser()).is_file():
        raise ToolError(f"{key}={path}: there is no such file.")
    interactions: dict[str, Any] = {}
    for entry in (yaml.safe_load(file.read_text()) or {}).get("interaction") or []:
        class_name = entry["class_name"]
        name = entry.get("name") or re.split("[.:]", class_name)[-1].removesuffix("Interaction").lower()
        if name in interactions:
            raise ToolError(f"{key}={path}: two interactions are called {name}; give them names.")
        interactions[name] = find_object(class_name, key=key)({**(entry.get("config") or {}), "name": name})
    return InteractionToolbox(interactions)


def _verl_tool(target: type, config: dict[str, Any], schema: dict[str, Any] | None) -> Toolbox:
    from dovetail.agents.verl.adapters import VerlToolbox
    from dovetail.agents.verl.bases import OpenAIFunctionToolSchema

    given = None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
    return VerlToolbox([target(config={"type": "native", **config}, tool_schema=given)])


def _converted(function: Callable[..., Any], signature: Any, convert: Callable[..., Any]) -> Callable[..., Any]:
    from dovetail.agents.tools.threads import call_function

    async def call(**arguments: Any) -> Any:
        return convert(await call_function(function, **arguments), name=signature.name)

    vars(call)["__dovetail_tool__"] = signature
    return call


def _sandbox_fusion(config: Mapping[str, Any], schema: Mapping[str, Any] | None) -> Toolbox:
    from dovetail.agents.tools.python import PythonToolbox

    name = schema["function"]["name"] if schema else "code_interpreter"
    return PythonToolbox(
        name=name,
        url=config.get("sandbox_fusion_url"),
        timeout_s=float(config.get("default_timeout", 30)),
        memory_limit_mb=int(config.get("memory_limit_mb", 1024)),
        max_concurrent=config.get("num_workers"),
    )


def _mcp(entry: Mapping[str, Any], path: str) -> Toolbox:
    from dovetail.agents.tools.mcp import McpToolbox, read_servers

    servers = entry.get("mcp_servers_config_path")
    if not servers:
        raise ToolError(f"{KEY}={path}: a tool of type mcp needs mcp.mcp_servers_config_path, a JSON of its servers.")
    return McpToolbox(read_servers(servers), selected=entry.get("tool_selected_list"))
