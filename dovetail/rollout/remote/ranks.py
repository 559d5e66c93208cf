"""One process of a trainer acts on the servers for all of them; every process takes part in gathering the weights."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from dovetail.rollout.base import EngineError
from dovetail.weight_sync import GatheredWeights, NamedTensors


def on_first_rank(weights: NamedTensors, act: Callable[[NamedTensors], None]) -> None:
    """`act(weights)` on rank 0 of the trainer's world, while the others take their tensors and wait for its outcome.

    An error of rank 0 is raised on every rank, so that none goes on with servers that have other weights.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        act(weights)
        return
    # Ranks must enter the gather together: if rank 0 pauses the servers first, another rank may still be waiting for
    # their responses, and both deadlock.
    dist.barrier()
    stream = GatheredWeights(weights)
    failure: BaseException | None = None
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            act(stream)
        except BaseException as error:  # noqa: BLE001  told to the other ranks, then raised here
            failure = error
            outcome[0] = f"{type(error).__name__}: {error}"
    # Gathering is collective: every rank takes every tensor, rank 0 also those that its error has left.
    stream.drain()
    dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        raise failure
    if outcome[0] is not None:
        raise EngineError(f"the first process could not update the servers' weights: {outcome[0]}")
