"""A trainer's weight group as SGLang's model processes are in it. Says what SGLang must be told; makes no calls.

The bytes go from the sender to SGLang's processes, past this one. SGLang receives what it is told to, in that order, so
each bucket that the sender announces is checked here and becomes one call for each stretch without gaps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from dovetail.rollout.base import EngineError, WeightUpdateError
from dovetail.rollout.sglang.environment import GLOO_INTERFACE
from dovetail.weight_sync import Announcements, Bucket, ExpectedWeights, GroupAddress, WeightAccount
from dovetail.weight_sync.broadcast import LOOPBACK


class JoinedGroup:
    """Instances of `workers_each` processes, on consecutive ranks from `first_rank` on."""

    def __init__(self, address: GroupAddress, first_rank: int, *, num_instances: int, workers_each: int) -> None:
        last_rank = first_rank + num_instances * workers_each - 1
        if not 1 <= first_rank <= last_rank < address.world_size:
            raise ValueError(
                f"ranks {first_rank} to {last_rank} of SGLang's processes are not all in a group of "
                f"{address.world_size}, whose rank 0 sends; open it for {num_instances * workers_each} receivers more."
            )
        if address.backend == "gloo" and address.host != LOOPBACK and GLOO_INTERFACE not in os.environ:
            raise EngineError(
                f"the sender is at {address.host}, and SGLang's processes use gloo on the loopback interface; start "
                f"the engine with {GLOO_INTERFACE} naming the interface that leads there."
            )
        self.name = address.group_name
        self._address = address
        self._first_rank = first_rank
        self._workers_each = workers_each
        self._announcements = Announcements(address, num_instances * workers_each)

    def join_body(self, index: int) -> dict[str, Any]:
        """Of `/init_weights_update_group` for the index-th instance."""
        return {
            "master_address": self._address.host,
            "master_port": self._address.port,
            "rank_offset": self._first_rank + index * self._workers_each,
            "world_size": self._address.world_size,
            "group_name": self.name,
            "backend": self._address.backend,
        }

    def receive_bodies(self, expected: ExpectedWeights) -> Iterator[dict[str, Any]]:
        """Of `/update_weights_from_distributed`, for one update as it is sent. WeightUpdateError for the first tensor
        that does not fit, before SGLang hears of it, or for what never came. BroadcastFailedError is the sender's."""
        account = WeightAccount(expected)
        for entries in self._announcements.update():
            for entry in entries:
                problem = account.problem_with(entry.name, entry.shape)
                if problem is not None:
                    raise WeightUpdateError(problem)
            for run, _ in Bucket(entries, torch.empty(0)).runs():
                yield {
                    # A tied tensor goes under the one name that SGLang loads it by.
                    "names": [expected.ties.get(entry.name, entry.name) for entry in run],
                    "dtypes": [entry.dtype for entry in run],
                    "shapes": [list(entry.shape) for entry in run],
                    "group_name": self.name,
                    "load_format": "flattened_bucket",
                }
        gap = account.gap()
        if gap is not None:
            raise WeightUpdateError(gap)
