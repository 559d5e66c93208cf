"""What can be set: typed sections, their checks and the plan. Imports neither torch nor ray."""

from dovetail.config.errors import ConfigError, Notice, Problem
from dovetail.config.load import LoadedConfig, load_config
from dovetail.config.root import DovetailConfig

__all__ = ["ConfigError", "DovetailConfig", "LoadedConfig", "Notice", "Problem", "load_config"]
