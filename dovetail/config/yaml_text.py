"""Read and write YAML with libyaml where PyYAML has it: in Python alone a run's configuration takes 50 ms to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def load_yaml(text: str) -> Any:
    """Raises `yaml.YAMLError`."""
    return yaml.load(text, Loader=_Loader)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """In the order of the keys."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
