"""What a node says of itself when asked by `dovetail doctor --cluster`."""

from __future__ import annotations

import importlib.metadata
import os
import platform


def node_facts(folder: str) -> dict[str, object]:
    """Versions that must agree on all nodes, and whether `folder` is there."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "ray", "dovetail")}
    return {"python": platform.python_version(), **versions, "sees_folder": os.path.isdir(folder)}
