"""`multi_turn.tool_config_path`: the one reader of verl's YAML of tools, for prompts and for agents. Builds no tool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.data.errors import DataError

KEY = "multi_turn.tool_config_path"


def read_tool_file(path: str) -> list[dict[str, Any]]:
    """The entries: {class_name, config, tool_schema, mcp}, each optional. A bare list of schemas is one, too."""
    import yaml

    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{KEY}={path}: there is no such file.")
    content = yaml.safe_load(file.read_text())
    entries = content.get("tools", []) if isinstance(content, Mapping) else content
    read = []
    for entry in entries or []:
        if not isinstance(entry, Mapping):
            raise DataError(f"{KEY}={path}: {entry!r} is no tool; write class_name, config and tool_schema.")
        is_schema = "function" in entry and not {"class_name", "tool_schema"} & entry.keys()
        read.append({"tool_schema": dict(entry)} if is_schema else dict(entry))
    return read
