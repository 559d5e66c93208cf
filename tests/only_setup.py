"""A plugin of pytest: as if `make engines` had not been run. `make test-unit` loads it with `-p tests.only_setup`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

OPTIONAL = ("triton", "vllm", "megatron", "tensorboard", "sglang")


class _WithoutOptional(PathFinder):
    """Finds what is on the path but these libraries."""

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in OPTIONAL:
            return None
        return super().find_spec(fullname, path, target)


def hide_optional() -> None:
    sys.meta_path[:] = [_WithoutOptional if finder is PathFinder else finder for finder in sys.meta_path]


def pytest_configure() -> None:
    """Before any test module is imported, in every process of pytest-xdist."""
    hide_optional()
