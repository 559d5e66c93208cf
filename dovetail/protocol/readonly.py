"""A tensor over memory that other processes read too. Reads cost nothing; in-place writes are refused.

Ray hands every process on a node the same shared memory, mapped writable. numpy marks its arrays read-only there;
torch has no such mark, so ``column[mask] = 0`` in one worker would silently change the batch of every other worker.
This class is the missing mark. Views stay read-only; anything computed is an ordinary tensor.

Not covered, because torch gives no hook there: writing through ``data_ptr``/``untyped_storage``/DLPack, collectives of
``torch.distributed`` that use the tensor as their output, code inside ``torch.compile``, and kernels that write to an
input without saying so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

_WRITING_OPERATORS = frozenset(
    f"__{name}__"
    for name in (
        *("setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
)
# End in an underscore, but change no element.
_HARMLESS = frozenset({"requires_grad_", "detach_"})
# torch.compile walks up the chain of bases; wrapping each would make the chain endless.
_BASE: Any = torch.Tensor._base
_GET_BASE = _BASE.__get__


class ReadOnlyTensor(torch.Tensor):
    """A view of shared memory. ``clone()`` gives an ordinary tensor; so does every operation that computes."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            # Tracing: this method is inlined into the graph, which has no place for its checks.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if _writes(name, args, kwargs):
            raise RuntimeError(
                f"{name!r} would write into a column that other processes share (it came through Ray without a copy). "
                f"Write to a copy: column.clone(), or batch.writable() for all columns."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func is torch.Tensor.as_subclass or func == _GET_BASE:
                return result
            return _protect(result, list(_readonly(args)) + list(_readonly(kwargs.values())))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copy = self.clone()
        return copy

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(proto)


def is_readonly(tensor: torch.Tensor) -> bool:
    """Whether in-place writes to ``tensor`` are refused."""
    return isinstance(tensor, ReadOnlyTensor)


def _writes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if "out" in kwargs and next(iter(_readonly([kwargs["out"]])), None) is not None:
        return True
    in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    if in_place or name in _WRITING_OPERATORS or kwargs.get("inplace") is True:
        return next(iter(_readonly(args[:1])), None) is not None
    return False


def _readonly(values: Iterable[Any]) -> Iterable[ReadOnlyTensor]:
    """The read-only tensors among ``values``, looking one level into lists and tuples."""
    for value in values:
        if isinstance(value, ReadOnlyTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (entry for entry in value if isinstance(entry, ReadOnlyTensor))


def _protect(result: Any, sources: list[ReadOnlyTensor]) -> Any:
    if isinstance(result, torch.Tensor):
        if not isinstance(result, ReadOnlyTensor) and any(_same_memory(result, source) for source in sources):
            return result.as_subclass(ReadOnlyTensor)
        return result
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
        return result
    if type(result) in (list, tuple):
        return type(result)(_protect(entry, sources) for entry in result)
    return result


def _same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    # Read-only columns live on the CPU: a result elsewhere is not one of their views.
    if left.device.type != "cpu":
        return False
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
