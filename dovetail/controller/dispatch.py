"""How the arguments of one call become the arguments of N ranks, and N results one. No processes here, only lists.

A dispatch function takes ``(group, *args, **kwargs)`` and returns the arguments with one list of ``world_size`` entries
in the place of each value; a collect function takes ``(group, outputs)`` with one output per rank. `Dispatch` names the
pairs; `register_dispatch_mode` adds one.

Batches that do not divide: modes that pad (DP_COMPUTE_PROTO and meshes made with ``pad=True``, or any batch whose
``auto_padding`` is set) append copies of the first rows and drop the matching rows of the result. The others refuse,
because a padding row would be trained on or counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from dovetail.controller.futures import BatchFuture, BatchSlice, GroupFuture
from dovetail.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto


@dataclass(frozen=True)
class MeshLayout:
    """``dp_ranks[rank]`` is the data-parallel rank; ``collect_ranks[dp_rank]`` the rank whose result counts."""

    dp_ranks: tuple[int, ...]
    collect_ranks: tuple[int, ...]

    @classmethod
    def of_answers(cls, role: str, mesh_name: str, answers: Sequence[tuple[int, bool]]) -> MeshLayout:
        """From each rank's data-parallel rank and whether its result counts."""
        dp_ranks = tuple(dp_rank for dp_rank, _ in answers)
        collectors: dict[int, list[int]] = {dp_rank: [] for dp_rank in range(max(dp_ranks) + 1)}
        for rank, (dp_rank, is_collect) in enumerate(answers):
            if is_collect:
                collectors[dp_rank].append(rank)
        wrong = {dp_rank: ranks for dp_rank, ranks in collectors.items() if len(ranks) != 1}
        if wrong or set(dp_ranks) != set(collectors):
            raise ValueError(
                f"mesh {mesh_name!r} of {role}: every data-parallel rank 0..{max(dp_ranks)} needs exactly one "
                f"collecting rank, but rank -> dp rank is {dict(enumerate(dp_ranks))} and dp rank -> collecting ranks "
                f"is {wrong or collectors}; check the is_collect given to _register_dispatch_collect_info."
            )
        return cls(dp_ranks, tuple(ranks[0] for ranks in collectors.values()))


class Ranks(Protocol):
    """A group of workers as dispatch and collect functions see it. `WorkerGroup` is one."""

    role: str
    world_size: int
    takes_slices: bool

    def mesh_layout(self, mesh_name: str) -> MeshLayout: ...


@dataclass(frozen=True)
class Padding:
    """``added`` rows were appended, which made ``total``."""

    added: int
    total: int


@dataclass(frozen=True)
class RankArguments:
    """Arguments by rank: every list has ``world_size`` entries. ``padding`` is set when batches were padded."""

    args: Sequence[Sequence[Any]]
    kwargs: dict[str, Sequence[Any]]
    padding: Padding | None = None

    def of(self, rank: int) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one rank."""
        return [values[rank] for values in self.args], {name: values[rank] for name, values in self.kwargs.items()}


def dispatch_one_to_all(group: Ranks, *args: Any, **kwargs: Any) -> RankArguments:
    """Every rank gets the same arguments. Each rank fetches all rows of a future."""
    copies = group.world_size
    return RankArguments(
        [[_for_all(arg)] * copies for arg in args], {name: [_for_all(arg)] * copies for name, arg in kwargs.items()}
    )


def dispatch_all_to_all(group: Ranks, *args: Any, **kwargs: Any) -> RankArguments:
    """Lists of ``world_size`` entries, one for each rank; if any argument is something else, all ranks get the same."""
    values = [*args, *kwargs.values()]
    if values and all(isinstance(value, list) and len(value) == group.world_size for value in values):
        return RankArguments(list(args), dict(kwargs))
    return dispatch_one_to_all(group, *args, **kwargs)


def dispatch_dp_compute(group: Ranks, *args: Any, **kwargs: Any) -> RankArguments:
    """Every argument is a list or tuple with one entry per rank."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        if not isinstance(value, (list, tuple)) or len(value) != group.world_size:
            size = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
            raise ValueError(
                f"DP_COMPUTE: argument {name!r} is a {type(value).__name__}{size}; pass a list with one entry for each "
                f"of the {group.world_size} ranks of {group.role}."
            )
    return RankArguments(list(args), dict(kwargs))


def dispatch_dp_compute_data_proto(group: Ranks, *args: Any, pad_batches: bool, **kwargs: Any) -> RankArguments:
    """Each rank gets its equal share of every batch; arguments that are not batches go to all ranks."""
    return split_batches(group, range(group.world_size), args, kwargs, pad=pad_batches)


def dispatch_dp_compute_data_proto_with_func(
    group: Ranks, func: Callable[..., Any], *args: Any, **kwargs: Any
) -> RankArguments:
    """Like DP_COMPUTE_PROTO for a method whose first argument is a function, which goes to every rank."""
    if not callable(func):
        raise TypeError(
            f"DP_COMPUTE_PROTO_WITH_FUNC: the first argument must be a function, not {type(func).__name__}."
        )
    split = split_batches(group, range(group.world_size), args, kwargs, pad=True)
    return RankArguments([[func] * group.world_size, *split.args], split.kwargs, split.padding)


def dispatch_mesh(mesh_name: str, pad: bool, group: Ranks, *args: Any, **kwargs: Any) -> RankArguments:
    """All ranks with one data-parallel rank of the mesh get the same share of every batch."""
    return split_batches(group, group.mesh_layout(mesh_name).dp_ranks, args, kwargs, pad=pad)


def collect_all(group: Ranks, outputs: Sequence[Any]) -> list[Any]:
    """One result per rank, in rank order."""
    return list(outputs)


def collect_rank_zero(group: Ranks, outputs: Sequence[Any]) -> Any:
    """The result of rank 0."""
    return outputs[0]


def collect_batches(group: Ranks, outputs: Sequence[Any]) -> DataProto:
    """The concatenated batches of the ranks that were collected, in data-parallel order."""
    for output in outputs:
        if not isinstance(output, DataProto):
            raise TypeError(
                f"a method of {group.role} whose results are concatenated must return a DataProto on every collecting "
                f"rank, but one returned {type(output).__name__}; register it with another dispatch mode."
            )
    return DataProto.concat(list(outputs))


def drop_padding(output: Any, padding: Padding | None) -> Any:
    """Drop the rows of a result that belong to padding rows of the input.

    A method may make k rows of each row (samples per prompt): k times the padding is dropped. A result without rows
    (metrics only) stays as it is.
    """
    if padding is None or not isinstance(output, DataProto) or len(output) == 0:
        return output
    if len(output) % padding.total:
        raise ValueError(
            f"the input was padded to {padding.total} rows and the result has {len(output)}, which is not a multiple: "
            "the padding rows cannot be told apart. Pad and un-pad the batch yourself, or pass one that divides."
        )
    return unpad_dataproto(output, padding.added * (len(output) // padding.total))


def split_batches(
    group: Ranks, dp_ranks: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any], *, pad: bool
) -> RankArguments:
    """Share every batch among data-parallel ranks; ``dp_ranks[rank]`` says which share a rank gets."""
    chunks = max(dp_ranks) + 1
    names = [*range(len(args)), *kwargs]
    values = [*args, *kwargs.values()]
    values, padding = _padded(group, dict(zip(names, values, strict=True)), chunks, pad)
    spread = []
    for value in values:
        shares = value.chunk(chunks) if isinstance(value, (DataProto, BatchFuture)) else [_for_all(value)] * chunks
        spread.append([shares[dp_rank] for dp_rank in dp_ranks])
    return RankArguments(spread[: len(args)], dict(zip(kwargs, spread[len(args) :], strict=True)), padding)


def _padded(group: Ranks, values: dict[int | str, Any], chunks: int, pad: bool) -> tuple[list[Any], Padding | None]:
    """Batches of equal length that divide by ``chunks``, and what was added to make them so.

    Futures stay futures when nothing needs padding: their length is not known here, and their rows must stay beside
    those of the other batches. Otherwise they are fetched first.
    """
    batches = {name: value for name, value in values.items() if isinstance(value, DataProto)}
    futures = {name: value for name, value in values.items() if isinstance(value, BatchFuture)}
    if not batches and not futures:
        raise TypeError(
            f"a call that shares a batch among the ranks of {group.role} got no DataProto; pass one, or register the "
            "method with Dispatch.ONE_TO_ALL."
        )
    uneven = any(len(batch) % chunks for batch in batches.values())
    if futures and (uneven or not all(future.lazy for future in futures.values()) or not group.takes_slices):
        fetched = {name: future.get() for name, future in futures.items()}
        return _padded(group, {**values, **fetched}, chunks, pad)
    lengths = {name: len(batch) for name, batch in batches.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"batches of one call must have the same number of rows, but argument -> rows is {lengths}.")
    if not uneven:
        return list(values.values()), None
    rows = next(iter(lengths.values()))
    if not pad and not all(batch.is_padding_enabled() for batch in batches.values()):
        raise ValueError(
            f"{rows} rows do not divide by the data-parallel size {chunks} of {group.role}; use a multiple of "
            f"{chunks}, or pad with pad_dataproto_to_divisor if the method may see a row twice."
        )
    padded = {name: pad_dataproto_to_divisor(batch, chunks)[0] for name, batch in batches.items()}
    total = len(next(iter(padded.values())))
    return list({**values, **padded}.values()), Padding(added=total - rows, total=total)


def _for_all(value: Any) -> Any:
    """A value for all ranks: a lazy batch is fetched by each rank, other futures here."""
    if isinstance(value, BatchFuture) and value.lazy:
        return BatchSlice(value.parts, 0, 1)
    return value.get() if isinstance(value, GroupFuture) else value


dispatch_padded = partial(dispatch_dp_compute_data_proto, pad_batches=True)
dispatch_even = partial(dispatch_dp_compute_data_proto, pad_batches=False)
