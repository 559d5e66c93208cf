"""One process of a trainer acts on the servers for all of them; every process takes part in gathering the weights."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from dovetail.rollout.base import EngineError
from dovetail.weight_sync import NamedTensors


def on_first_rank(weights: NamedTensors, act: Callable[[NamedTensors], None]) -> None:
    """`act(weights)` on rank 0 of the trainer's world, while the others take their tensors and wait for its outcome.

    An error of rank 0 is raised on every rank, so that none goes on with servers that have other weights.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        act(weights)
        return
    # A rank that still waits for answers of servers which the first one holds would never come to the gather.
    dist.barrier()
    failure: BaseException | None = None
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            act(weights)
        except BaseException as error:  # noqa: BLE001  told to the other ranks, then raised here
            failure = error
            outcome[0] = f"{type(error).__name__}: {error}"
    else:
        for _ in weights:  # gathering is collective: every rank takes every tensor
            pass
    dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        raise failure
    if outcome[0] is not None:
        raise EngineError(f"the first process could not update the servers' weights: {outcome[0]}")
