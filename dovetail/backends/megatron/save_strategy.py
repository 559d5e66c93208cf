"""Megatron's `torch_dist` checkpoint format, written by this process with torch's own writer.

Megatron's writer forks processes and starts a manager by re-importing the main program, for saving in the background.
Here a save is finished before training goes on: no process is started, and an error of any rank reaches all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from dovetail.checkpoint.one_process import without_collectives


class PlainSave(SaveShardedStrategy):
    """Reads back with Megatron's own loader."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Collective; each shard is written by the rank that holds its first copy."""
        own, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        dcp.save(
            mcore_to_pyt_state_dict(own, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            no_dist=without_collectives(dist.get_world_size()),
        )
