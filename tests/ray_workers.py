"""Ray workers that start at once, for tests.

A worker that trains costs nine CPU seconds before its first call, seven of them imports. Ray lets us choose the program
that it starts as a worker (`py_executable` in `runtime_env`): here one of `tests.quick_python`.
"""

from __future__ import annotations

from typing import Any

from tests.quick_python import quick_python


def quick_workers(*preload: str) -> dict[str, Any]:
    """A `runtime_env` with which a Ray of this process, or of one that it starts, has such workers."""
    return {"py_executable": " ".join(quick_python(*preload).words)}
