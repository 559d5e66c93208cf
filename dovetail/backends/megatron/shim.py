"""Megatron-core on a machine without CUDA. Does nothing at all where CUDA is available.

Megatron asks for `device="cuda"` by name in places that no argument reaches. Inside `cuda_to_cpu()` such a wish gives
the CPU, and the few functions of `torch.cuda` that it calls do what they would do for one CPU stream. Outside of it
`torch.cuda` is as it was. Paths below are those of megatron-core 0.16.1; `tests/backends_megatron` notices when they
change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


@contextmanager
def cuda_to_cpu() -> Iterator[None]:
    """Around everything that runs Megatron's code, in each thread that does. Re-entrant."""
    if torch.cuda.is_available() or getattr(_THREAD, "inside", False):
        yield
        return
    _patch_megatron_once()
    _count_users(1)
    _THREAD.inside = True
    try:
        with _Redirect():
            yield
    finally:
        _THREAD.inside = False
        _count_users(-1)


_THREAD = threading.local()  # torch's function modes are one thread's own; backward on a CPU runs in the caller's
_LOCK = threading.Lock()
_OWN: dict[str, Any] = {}
"""What `torch.cuda` had, while stand-ins are in its place."""
_users = 0
_stance: Any = None


def _count_users(change: int) -> None:
    """The first thread that enters changes what is the whole process's, the last one that leaves puts it back."""
    global _users, _stance
    with _LOCK:
        if _users == 0 and change > 0:
            _OWN.update({name: getattr(torch.cuda, name) for name in _STAND_INS})
            _set_in_cuda(_STAND_INS)
            # What Megatron compiles is not worth a compiler's minute on a CPU, nor a compiler.
            _stance = torch.compiler.set_stance("force_eager")
        _users += change
        if _users == 0:
            _set_in_cuda(_OWN)
            _stance.__exit__(None, None, None)


def _set_in_cuda(values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(torch.cuda, name, value)


class _Redirect(TorchFunctionMode):
    """Explicit CUDA placement becomes CPU placement."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if not kwargs and func not in _REDIRECTED:  # most calls: every attribute of a tensor that is read is one
            return func(*args)
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:  # parameters are moved by `.cuda(torch.cuda.current_device())`
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # clip_grads.py:167 and distrib_optimizer.py:361, 420, 582 compare with "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if kwargs.get("pin_memory"):  # rope_utils.py:62, context parallel
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if _is_cuda(kwargs.get("device")):  # schedules.py:596, 983, 2138; clip_grads.py; utils.py:1207
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


_REDIRECTED = frozenset((Tensor.cuda, Tensor.type, Tensor.record_stream, Tensor.to))
"""What asks for CUDA without a keyword."""


def _is_cuda(device: Any) -> bool:
    kind = device.type if isinstance(device, torch.device) else device.split(":")[0] if isinstance(device, str) else ""
    return kind == "cuda"


class _Event:
    """A point on the one stream there is: it has passed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    """The order in which statements run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


_STREAM = _Stream()


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


_STAND_INS: dict[str, Any] = {
    "current_device": lambda: _CPU,  # rotary_pos_embedding.py:162, p2p_communication.py, router.py
    "set_device": _nothing,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "Stream": _Stream,  # token_dispatcher.py:445, 871 overlap the copy of split sizes
    "Event": _Event,
    "stream": lambda stream: nullcontext(stream),
    "current_stream": lambda *args: _STREAM,
    "default_stream": lambda *args: _STREAM,
    # Not torch.manual_seed, which seeds every device and would call this again.
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "get_rng_state": _get_rng_state,  # random.py: the tracker behind dropout and recompute
    "set_rng_state": _set_rng_state,
}


def _patch_megatron_once() -> None:
    """What Megatron binds by name, so that changing `torch.cuda` does not reach it."""
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import token_dispatcher

    if getattr(random, "_get_cuda_rng_state", None) is _get_rng_state:
        return
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    # On a GPU the copy to the host also turns split sizes into numpy arrays, which all_to_all_single needs.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_host_value
    mappings._gather_along_first_dim = _gather_uneven(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _scatter_uneven(mappings._reduce_scatter_along_first_dim)


def _as_host_value(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _gather_uneven(even: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Experts that share tokens over tensor-parallel ranks gather unequal parts: NCCL can, gloo cannot."""

    def gather(x: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even(x, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: x.size(0)] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather


def _scatter_uneven(even: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The way back of `_gather_uneven`."""

    def scatter(x: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even(x, group, input_split_sizes, use_global_buffer)
        total = x.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].contiguous()

    return scatter
