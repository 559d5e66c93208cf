"""State of a model spread over processes, on disk: each rank writes its part, any number of ranks reads it back.

Keys are names of the unsharded model, so what one sharding wrote another can read. A snapshot may be written in a
thread while training goes on. Knows no training loop; whether the folder is complete is the business of
``checkpoint.store``.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import re
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dovetail.checkpoint.manifest import BrokenCheckpoint, write_part
from dovetail.checkpoint.shard_files import PlainValues, SafeReader, UnsafeFileError, misfit
from dovetail.observability.waits import waiting
from dovetail.protocol.plain_file import PlainFileError, load_plain, save_plain

_WARNING = "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to"
_PATTERN = re.compile(_WARNING, re.IGNORECASE)
logger = logging.getLogger(__name__)

STATE_VERSION = 2
CONTENTS = ("model", "optimizer", "extra")
"""What a folder may hold, named as in ``checkpoint.save_contents``; ``extra``: schedule, random state and the rest."""
_SHARDS = "shards"
_DESCRIPTION = "state.json"
_EXTRA = "extra.safetensors"
# Flat keys (`state.<parameter>.exp_avg`) do not depend on how parameters are grouped or numbered.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
BACKGROUND_LIMIT_S = 3600.0
"""A save that takes longer than this hangs, on a dead disk or in a collective with a rank that is gone."""


def without_collectives(world_size: int) -> bool:
    """The value of `no_dist` for this many processes; with one, its warning is silenced."""
    # For the process and not with `catch_warnings`: that is not safe in threads, and saves run in one. Once only:
    # every change of the filters makes Python repeat all other warnings it has shown.
    if world_size == 1 and not any(entry[1] == _PATTERN for entry in warnings.filters):
        warnings.filterwarnings("ignore", message=_WARNING, category=UserWarning)
    return world_size == 1


def capture_rng() -> dict[str, Any]:
    """Everything that decides the next random number in this process."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Continue the random numbers of ``capture_rng``. An accelerator's state is left out where there is none."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@dataclass(frozen=True)
class StateSnapshot:
    """What one rank writes. With ``copied`` it holds memory of its own, and training may go on."""

    tensors: dict[str, Any]
    random_state: dict[str, Any]
    extra: dict[str, Any]
    contents: list[str]
    has_steps: bool


def save_sharded(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    extra: Mapping[str, Any],
    contents: Collection[str] = CONTENTS,
) -> None:
    """Write ``contents``: weights, optimizer state, and every rank's random state with ``extra`` of rank 0. Collective.

    An error on any rank is raised on all of them, so no rank goes on with a checkpoint that another has lost.
    """
    write_snapshot(folder, take_snapshot(module, optimizer, extra=extra, contents=contents))


def take_snapshot(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    extra: Mapping[str, Any],
    contents: Collection[str] = CONTENTS,
    copied: bool = False,
) -> StateSnapshot:
    """This rank's part of ``contents``. ``copied``: in host memory of its own, as a save in the background needs it."""
    # Asking a fresh optimizer for its state makes the library take an empty step first, which would count as a step.
    has_steps = optimizer is not None and bool(optimizer.state)
    saved = [name for name in CONTENTS if name in contents and (name != "optimizer" or optimizer is not None)]
    tensors: dict[str, Any] = {}
    if "model" in saved:
        tensors["model"] = get_model_state_dict(module, options=_OPTIONS)
    if "optimizer" in saved and optimizer is not None and has_steps:
        tensors["optimizer"], _ = _optimizer_state(module, optimizer)
    if copied and tensors:
        tensors = BlockingAsyncStager().stage(tensors)
    return StateSnapshot(tensors, capture_rng(), copy.deepcopy(dict(extra)), saved, has_steps)


def write_snapshot(folder: Path, snapshot: StateSnapshot, group: dist.ProcessGroup | None = None) -> None:
    """Write what every rank has taken. Collective over ``group``; a thread needs one of its own."""
    rank, world_size = _rank_and_world_size()
    together(folder.mkdir, parents=True, exist_ok=True, group=group)
    try:
        dcp.save(
            snapshot.tensors,
            storage_writer=dcp.FileSystemWriter(folder / _SHARDS),
            process_group=group,
            no_dist=without_collectives(world_size),
        )
    except CheckpointException as failure:  # not an Exception: it would pass every handler on its way out
        raise OSError(f"{folder} could not be written: {first_failure(failure)}") from failure

    description = {
        "version": STATE_VERSION,
        "world_size": world_size,
        "contents": snapshot.contents,
        "has_steps": snapshot.has_steps,
    }
    together(write_small_files, folder, description, snapshot.extra, snapshot.random_state, rank, group=group)


def write_small_files(
    folder: Path, description: Mapping[str, Any], extra: Mapping[str, Any], random_state: Mapping[str, Any], rank: int
) -> None:
    """This rank's random state, rank 0's description and ``extra``, and the list of all files that this rank wrote."""
    if "extra" in description["contents"]:
        save_plain(dict(random_state), folder / _rng_name(rank))
    if rank == 0:
        if "extra" in description["contents"]:
            save_plain(dict(extra), folder / _EXTRA)
        (folder / _DESCRIPTION).write_text(json.dumps(description))
    write_part(folder, rank)


def load_sharded(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    contents: Collection[str] = CONTENTS,
) -> dict[str, Any] | None:
    """Read ``contents``; return ``extra``, or None when it is not among them. Collective.

    Random state is one file per rank of the run that saved; with another number of ranks there is no right one, so
    the current state is kept and this is said.
    """
    _, world_size = _rank_and_world_size()
    description = read_description(folder)
    if description.get("backend") is not None:
        raise BrokenCheckpoint(
            folder, f"it was saved by the {description['backend']} backend; export it to a folder and start from that"
        )
    wanted = [name for name in CONTENTS if name in contents and (name != "optimizer" or optimizer is not None)]
    require_contents(folder, description, wanted)
    state: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    if "model" in wanted:
        state["model"] = get_model_state_dict(module, options=_OPTIONS)
    if "optimizer" in wanted and optimizer is not None:
        # From empty, the library makes all parameters' state in the same order on all ranks. What FSDP1 has after
        # real steps lacks the parameters a rank holds nothing of, and ranks would then wait in different collectives.
        optimizer.zero_grad(set_to_none=True)
        optimizer.state.clear()
        if description["has_steps"]:
            state["optimizer"], settings = _optimizer_state(module, optimizer)
    try:
        reader = SafeReader(folder / _SHARDS)
        if (reason := misfit(reader.read_metadata(), state)) is not None:
            raise BrokenCheckpoint(
                folder,
                f"{reason}; set what the run that saved it had (model.path, override_config, lora_rank, "
                "target_modules, optim.optimizer), or `dovetail export` it and start from that folder",
            )
        dcp.load(
            state,
            storage_reader=reader,
            planner=PlainValues(),
            no_dist=without_collectives(world_size),
        )
    except UnsafeFileError as error:
        raise BrokenCheckpoint(folder, str(error), damaged=True) from error
    except CheckpointException as failure:
        raise BrokenCheckpoint(folder, first_failure(failure), damaged=True) from failure
    if "model" in state:
        set_model_state_dict(module, state["model"], options=_OPTIONS)
    if "optimizer" in state and optimizer is not None:
        set_optimizer_state_dict(module, optimizer, {**state["optimizer"], **settings}, options=_OPTIONS)
    if "extra" not in wanted:
        return None
    _restore_random_state(folder, description["world_size"])
    return read_extra(folder)


def _optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """What steps have made of the optimizer, which is saved, and its settings, which are those of each run."""
    state, settings = {}, {}
    for name, value in get_optimizer_state_dict(module, optimizer, options=_OPTIONS).items():
        (settings if name.startswith("param_groups.") else state)[name] = value
    return state, settings


def read_description(folder: Path) -> dict[str, Any]:
    """What ``save_sharded`` noted about a folder: ``version``, ``world_size``, ``contents``, ``has_steps``."""
    try:
        description = json.loads((folder / _DESCRIPTION).read_text())
        version = int(description["version"])
        if not isinstance(description["contents"], list):
            raise TypeError("contents is no list")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenCheckpoint(folder, f"{_DESCRIPTION} is not readable ({error})", damaged=True) from error
    if version > STATE_VERSION:
        raise BrokenCheckpoint(folder, f"its state has version {version}, this program reads up to {STATE_VERSION}")
    return description


def require_contents(folder: Path, description: Mapping[str, Any], wanted: Collection[str]) -> None:
    """BrokenCheckpoint when the folder lacks something, or holds it in a form that could run code."""
    if missing := [name for name in wanted if name not in description["contents"]]:
        raise BrokenCheckpoint(
            folder, f"it was saved without {', '.join(missing)}; leave that out of checkpoint.load_contents"
        )
    if "extra" in wanted and description["version"] < 2:
        raise BrokenCheckpoint(
            folder,
            "an earlier version of dovetail saved it with pickled files (extra.pt, rng_<rank>.pt), which can run code "
            "and are not read; continue from its weights with checkpoint.load_contents=[model,optimizer], or "
            "`dovetail export` it",
        )


def read_extra(folder: Path) -> dict[str, Any]:
    """What the caller gave to be saved."""
    return _read_plain(folder, _EXTRA)


def set_random_state(folder: Path, rank: int, restore: Callable[[dict[str, Any]], None]) -> None:
    """Give what ``rank`` saved to ``restore``."""
    state = _read_plain(folder, _rng_name(rank))
    try:
        restore(state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BrokenCheckpoint(folder, f"{_rng_name(rank)} is no random state ({error})", damaged=True) from error


def _read_plain(folder: Path, name: str) -> dict[str, Any]:
    try:
        return load_plain(folder / name)
    except (OSError, PlainFileError) as error:
        raise BrokenCheckpoint(folder, str(error), damaged=True) from error


def _rng_name(rank: int) -> str:
    return f"rng_{rank}.safetensors"


def together(action: Callable[..., Any], *args: Any, group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
    """Run ``action`` on every rank; if any rank failed, raise on all, naming the first that did."""
    error: OSError | RuntimeError | None = None
    try:
        action(*args, **kwargs)
    except (OSError, RuntimeError) as caught:  # what writing can raise
        error = caught
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else f"{type(error).__name__}: {error}", group=group)
    failed = [(rank, text) for rank, text in enumerate(errors) if text is not None]
    if failed:
        raise OSError(f"rank {failed[0][0]} could not write its part of the checkpoint: {failed[0][1]}") from error


def _restore_random_state(folder: Path, saved_world_size: int) -> None:
    rank, world_size = _rank_and_world_size()
    if saved_world_size == world_size:
        set_random_state(folder, rank, restore_rng)
    elif rank == 0:
        logger.warning(
            "%s was saved by %d processes and is loaded by %d: random state is not restored",
            folder, saved_world_size, world_size,
        )  # fmt: skip


def first_failure(failure: CheckpointException) -> str:
    """What went wrong on the first rank that failed."""
    rank, (error, _) = next(iter(sorted(failure.failures.items(), key=lambda item: item[0])))
    lines = str(error).splitlines() or [""]
    return f"rank {rank}: {type(error).__name__}: {lines[0]}"


def _rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class BackgroundSave:
    """One writer per model and process. Every rank calls `start` and `finish` alike.

    The thread's collectives go over a group of their own (gloo, on the host): in the group of training they would meet
    the collectives of the step that runs meanwhile.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._folder = Path()
        self._error: BaseException | None = None
        self._group: dist.ProcessGroup | None = None

    def start(self, folder: Path, snapshot: StateSnapshot) -> None:
        """Begin to write; returns at once, unless the last save is not over yet."""
        self.finish()
        if dist.is_initialized() and self._group is None:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup), "every rank saves, so every rank is in the group"
            self._group = group
        self._folder = folder
        self._thread = threading.Thread(target=self._write, args=(folder, snapshot), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the save that runs, if one does, and raise what went wrong in it; `WaitTimeout` if it hangs."""
        if self._thread is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            with waiting(
                f"rank {rank}", f"its save in the background of {self._folder}", limit_s=BACKGROUND_LIMIT_S
            ) as wait:
                self._thread.join(wait.left())
                if self._thread.is_alive():
                    raise wait.error()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, folder: Path, snapshot: StateSnapshot) -> None:
        try:
            write_snapshot(folder, snapshot, self._group)
        except BaseException as error:  # noqa: BLE001  kept for `finish`: a thread has nobody to raise to
            self._error = error
