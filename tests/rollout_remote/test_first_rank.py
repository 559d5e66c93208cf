"""An error of the first rank reaches all ranks: none is left behind in the gather of weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from dovetail.rollout.remote.update import on_first_rank
from dovetail.weight_sync import NamedTensors
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

NUM_TENSORS = 5


def _gathered(taken: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for number in range(NUM_TENSORS):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)  # as a sharded backend: every tensor is a collective
        taken.append(f"{number}: {tensor.item():.0f}")
        yield str(number), tensor


def _update(rank: int, world_size: int, stop_after: int) -> tuple[str, list[str]]:
    taken: list[str] = []

    def act(weights: NamedTensors) -> None:
        for number, _ in enumerate(weights):
            if number + 1 == stop_after:
                break
        if stop_after < NUM_TENSORS:
            raise ConnectionError("no server answers")

    try:
        if stop_after == 0:
            on_first_rank(_gathered(taken), _refuse)
        else:
            on_first_rank(_gathered(taken), act)
    except Exception as error:  # noqa: BLE001  what each rank raises is the claim
        return f"{type(error).__name__}: {error}", taken
    return "", taken


def _refuse(weights: NamedTensors) -> None:
    raise ConnectionError("no server answers")


@pytest.mark.parametrize("stop_after", [0, 2, NUM_TENSORS])
def test_every_rank_takes_every_tensor_and_hears_what_went_wrong(stop_after: int) -> None:
    (first, taken_first), (second, taken_second) = run_ranks(_update, 2, stop_after, timeout=60)
    assert taken_first == taken_second == [f"{number}: 2" for number in range(NUM_TENSORS)]
    if stop_after == NUM_TENSORS:
        assert first == second == ""
    else:
        assert first == "ConnectionError: no server answers"
        assert second.endswith("could not update the servers' weights: ConnectionError: no server answers")
