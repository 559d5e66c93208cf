"""Stands in for SGLang's compiled kernels on a machine without CUDA. Computes nothing: every call is an error.

SGLang 0.5.18 imports two names of `sgl_kernel` in modules that a CPU engine loads too (`mem_cache/allocation.py`,
`speculative/cache_move.py` among them), and publishes no CPU build of the package. Everything else it wants from here
it asks for only after `cpu_has_amx_support()`, which is false as long as no compiled operator is registered: plain
torch runs then. So every name can be imported, and none can be used unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0.0+none"  # SGLang compares versions on CUDA only


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)  # what `import` itself looks for (`__path__`, `__wrapped__`) really is not there

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a compiled kernel, and this machine has none.")

    return missing
