"""What can be set: typed sections, their checks and the plan. Imports neither torch nor ray.

The names below are imported at their first use: a scoring process needs only `user_code`, and the sections are most of
what its start would cost.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.config.errors import ConfigError, Notice, Problem
    from dovetail.config.load import LoadedConfig, load_config
    from dovetail.config.root import DovetailConfig

__all__ = ["ConfigError", "DovetailConfig", "LoadedConfig", "Notice", "Problem", "load_config"]

_HOMES = {"ConfigError": "errors", "Notice": "errors", "Problem": "errors", "DovetailConfig": "root"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"dovetail.config has no {name!r}; it has {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"dovetail.config.{_HOMES.get(name, 'load')}"), name)
