"""The imports that contest programs leave out: `gcd`, `List` and `deque` are taken for granted.

Only modules whose names occur in the program are imported: all of them would cost more than most programs.
"""

from __future__ import annotations

import functools
import importlib
import re

# Later ones win where two define a name; Python's own names win over all but typing.
_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
_WORD = re.compile(r"[^\W\d]\w*")


def used_imports(code: str) -> str:
    """Lines to put before the program. Empty for a program with `from __future__`, which must come first."""
    if "__future__" in code:
        return ""
    words = set(_WORD.findall(code))
    named = [name for name in _MODULES if name in words or name == "sys"]
    starred = [name for name, exports in _exports().items() if exports & words]
    lines = [f"from {name} import *" for name in _MODULES if name in {*starred, "builtins"}]
    return "\n".join([*lines, *(f"import {name}" for name in named), "sys.setrecursionlimit(600000)", ""])


@functools.cache
def _exports() -> dict[str, frozenset[str]]:
    names_by_module = {}
    for name in _MODULES:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [word for word in vars(module) if not word.startswith("_")]
        names_by_module[name] = frozenset(public)
    builtins = names_by_module.pop("builtins")
    return {name: names if name == "typing" else names - builtins for name, names in names_by_module.items()}
