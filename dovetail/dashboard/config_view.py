"""The resolved configuration of a run: what differs from the defaults, and from another run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dovetail.config.keys import catalogue, is_secret_key
from dovetail.config.root import DovetailConfig
from dovetail.config.tree import leaves
from dovetail.config.yaml_text import load_yaml
from dovetail.dashboard.run_files import DashboardError

_HIDDEN = "(hidden)"


def read_config(file: Path) -> dict[str, Any]:
    """Dotted keys and values of a `config.yaml`. Values of keys that look like secrets are hidden."""
    try:
        tree = load_yaml(file.read_text(encoding="utf-8"))
    except OSError:
        raise DashboardError("this run has no config.yaml; it is written when a run starts.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DashboardError(f"config.yaml is not YAML: {str(error).splitlines()[0]}", status=422) from None
    if not isinstance(tree, dict):
        raise DashboardError("config.yaml holds no keys; it is not the configuration of a run.", status=422)
    return {key: _HIDDEN if value and is_secret_key(key) else value for key, value in leaves(tree)}


def config_rows(config: dict[str, Any], other: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """One row per key: its value, the default, the value in the other run, and what it means."""
    default, known = _defaults(), catalogue(DovetailConfig)
    keys = list(config) + [key for key in other or {} if key not in config]
    rows = []
    for key in keys:
        value, field = config.get(key), known.get(key)
        # A key left to follow another one was set by nobody, although its value is not the default's.
        follows = field.inherits if field is not None else None
        followed = follows is not None and follows in config and config[follows] == value
        row: dict[str, Any] = {
            "key": key,
            "value": value,
            "default": default.get(key),
            "is_default": followed or (key in default and default[key] == value),
            "meaning": (field.field.description or "") if field is not None else "",
        }
        if other is not None:
            row |= {"other": other.get(key), "differs": other.get(key) != value}
        rows.append(row)
    return rows


@cache
def _defaults() -> dict[str, Any]:
    return dict(leaves(DovetailConfig().model_dump(mode="json")))
