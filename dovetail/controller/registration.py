"""Mark the methods of a worker that a group may call: `@register`. Names the dispatch modes; runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, ClassVar, TypeVar

from dovetail.config.wording import did_you_mean
from dovetail.controller import dispatch as d
from dovetail.controller.dispatch import Ranks

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class DispatchMode:
    """How arguments go out and results come back.

    ``batch_ranks`` is set for modes whose result is one concatenated `DataProto`: the ranks that are collected, in the
    order of their rows. Only such results can be passed on as futures without a stop at the driver.
    """

    name: str
    dispatch_fn: Callable[..., Any]
    collect_fn: Callable[[Ranks, Sequence[Any]], Any]
    batch_ranks: Callable[[Ranks], Sequence[int]] | None = None
    rank_zero_only: bool = False

    def dispatch(self, group: Ranks, *args: Any, **kwargs: Any) -> d.RankArguments:
        """Arguments by rank. A user's function may return a plain ``(args, kwargs)`` pair."""
        result = self.dispatch_fn(group, *args, **kwargs)
        return result if isinstance(result, d.RankArguments) else d.RankArguments(*result)


def _all_ranks(group: Ranks) -> Sequence[int]:
    return range(group.world_size)


def _collecting_ranks(mesh_name: str, group: Ranks) -> Sequence[int]:
    return group.mesh_layout(mesh_name).collect_ranks


class Dispatch:
    """The dispatch modes by name. `register_dispatch_mode` adds to them; `Dispatch.mesh` makes one for a mesh."""

    RANK_ZERO = DispatchMode("RANK_ZERO", d.dispatch_one_to_all, d.collect_rank_zero, rank_zero_only=True)
    ONE_TO_ALL = DispatchMode("ONE_TO_ALL", d.dispatch_one_to_all, d.collect_all)
    ALL_TO_ALL = DispatchMode("ALL_TO_ALL", d.dispatch_all_to_all, d.collect_all)
    DP_COMPUTE = DispatchMode("DP_COMPUTE", d.dispatch_dp_compute, d.collect_all)
    DP_COMPUTE_PROTO = DispatchMode("DP_COMPUTE_PROTO", d.dispatch_padded, d.collect_batches, _all_ranks)
    DP_COMPUTE_PROTO_WITH_FUNC = DispatchMode(
        "DP_COMPUTE_PROTO_WITH_FUNC", d.dispatch_dp_compute_data_proto_with_func, d.collect_batches, _all_ranks
    )
    DP_COMPUTE_METRIC = DispatchMode("DP_COMPUTE_METRIC", d.dispatch_even, d.collect_all)

    _user_modes: ClassVar[dict[str, DispatchMode]] = {}

    @staticmethod
    def mesh(mesh_name: str, *, pad: bool = False) -> DispatchMode:
        """One share of the batch per data-parallel rank of a mesh that the workers registered by name.

        Results come from one rank of each data-parallel rank. With ``pad`` a batch that does not divide is padded: not
        for methods that train, a padding row would be trained on twice.
        """
        return DispatchMode(
            f"mesh({mesh_name!r})",
            partial(d.dispatch_mesh, mesh_name, pad),
            d.collect_batches,
            partial(_collecting_ranks, mesh_name),
        )

    @classmethod
    def get(cls, name: str) -> DispatchMode:
        """A mode by its name, built-in or registered by a user."""
        mode = cls._user_modes.get(name) or getattr(cls, name, None)
        if isinstance(mode, DispatchMode):
            return mode
        known = [*cls._user_modes, *(key for key, value in vars(cls).items() if isinstance(value, DispatchMode))]
        raise ValueError(f"unknown dispatch mode {name!r}.{did_you_mean(name, known) or f' Known: {known}.'}")


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode:
    """The same as `Dispatch.mesh`, under the name that users of verl know."""
    return Dispatch.mesh(mesh_name)


def register_dispatch_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> DispatchMode:
    """Add a dispatch mode; use the returned value, or ``Dispatch.get(name)``, in `register`."""
    if name in Dispatch._user_modes or hasattr(Dispatch, name):
        raise ValueError(f"a dispatch mode named {name!r} exists already; choose another name.")
    Dispatch._user_modes[name] = DispatchMode(name, dispatch_fn, collect_fn)
    return Dispatch._user_modes[name]


class Execute(Enum):
    """Which ranks run the method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class Registration:
    """The arguments that `register` was given for a method."""

    dispatch_mode: DispatchMode
    execute_mode: Execute = Execute.ALL
    blocking: bool = True
    materialize_futures: bool = True

    @property
    def rank_zero_only(self) -> bool:
        """Whether the call runs on rank 0 alone and returns its bare result."""
        return self.execute_mode is Execute.RANK_ZERO or self.dispatch_mode.rank_zero_only


def register(
    dispatch_mode: DispatchMode | dict[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[F], F]:
    """Let groups call this method. The method itself is not wrapped: called directly it is an ordinary method.

    ``blocking=False`` makes group calls return a future. With ``materialize_futures=False`` a future argument reaches
    the method as an object with ``get()``, so it can start before its input is there. ``dispatch_mode`` may be a dict
    with ``dispatch_fn`` and ``collect_fn``.
    """
    if isinstance(dispatch_mode, dict):
        if dispatch_mode.keys() != {"dispatch_fn", "collect_fn"}:
            raise ValueError(f"a dispatch dict needs exactly dispatch_fn and collect_fn, not {sorted(dispatch_mode)}.")
        dispatch_mode = DispatchMode("custom", dispatch_mode["dispatch_fn"], dispatch_mode["collect_fn"])
    if not isinstance(dispatch_mode, DispatchMode):
        raise TypeError(f"dispatch_mode must be one of Dispatch.*, not {dispatch_mode!r}.")
    if execute_mode is Execute.RANK_ZERO and dispatch_mode.batch_ranks is not None:
        raise ValueError(
            f"{dispatch_mode.name} shares a batch among all ranks, which Execute.RANK_ZERO would drop; use "
            "Dispatch.RANK_ZERO to run on rank 0 with the whole batch."
        )
    registration = Registration(dispatch_mode, execute_mode, blocking, materialize_futures)

    def mark(method: F) -> F:
        setattr(method, _MARK, registration)
        return method

    return mark


def registered_methods(cls: type) -> dict[str, Registration]:
    """The methods of a worker class that groups may call, inherited ones included."""
    methods = {}
    for owner in reversed(cls.__mro__):
        for name, member in vars(owner).items():
            registration = getattr(member, _MARK, None)
            if isinstance(registration, Registration):
                methods[name] = registration
            elif name in methods and not callable(member):
                del methods[name]
    return methods


_MARK = "__dovetail_registration__"
