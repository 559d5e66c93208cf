"""Tell YAML files from overrides on a command line. The one place that decides it, for every command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_YAML = (".yaml", ".yml")


def split_arguments(items: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Files (with `~` expanded) and overrides, each in the order given.

    `~/a.yaml`, `runs/lr=1/a.yaml` and an existing `lr=1.yaml` are files; `a.b=c`, `+a.b=c`, `~a.b` and `--option` are
    overrides.
    """
    files = [item for item in items if _is_file(item)]
    return [Path(os.path.expanduser(item)) for item in files], [item for item in items if not _is_file(item)]


def _is_file(item: str) -> bool:
    if item.startswith(("+", "--")):
        return False
    if item.endswith(_YAML) and os.path.isfile(os.path.expanduser(item)):
        return True
    name, is_assignment, _ = item.partition("=")
    if is_assignment:
        return "/" in name or os.sep in name
    return not item.startswith("~") or "/" in item
