"""Megatron's `torch_dist` checkpoint format: written by torch's own writer, read without running code of its files.

Megatron's writer forks processes and starts a manager by re-importing the main program, for saving in the background.
Here a save is finished before training goes on: no process is started, and an error of any rank reaches all of them.
Its reader unpickles `.metadata` and every sharded object without restriction. What is read, and how it is spread over
ranks, stays Megatron's.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint

from dovetail.checkpoint.shard_files import PlainValues, SafeReader, UnsafeFileError
from dovetail.checkpoint.sharded import without_collectives


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


class SafeLoad(TorchDistLoadShardedStrategy):
    """The weights and the optimizer's state."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Collective; each rank reads what its layout needs."""
        asked = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        own, flat, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = mcore_to_pyt_state_dict(own, True)
        # As `Any`: the checker takes the first base's constructor for that of both.
        planner = cast(Any, _SafePlanner)(
            shapes_validation_sharded_tensors=[tensor for tensor in asked if not tensor.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                tensor.key: tensor for tensor in asked if tensor.allow_shape_mismatch
            },
        )
        checkpoint.load_state_dict(state, SafeReader(checkpoint_dir), planner=planner)
        loaded = {name: _unwrap_pyt_sharded_tensor(value) for name, value in state.items()}
        loaded = _replace_sharded_keys_with_state_dict_keys(loaded, flat, renamed)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Any = None) -> Any:
        """Names and shapes of what is stored."""
        return super().load_tensors_metadata(
            Path(checkpoint_dir), metadata or SafeReader(checkpoint_dir).read_metadata()
        )


class SafeCommon(TorchCommonLoadStrategy):
    """What all ranks share: `common.pt`."""

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        """Plain values and tensors only, whatever torch's default is."""
        path = os.path.join(checkpoint_dir, COMMON_STATE_FNAME)
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise CheckpointingException(f"{COMMON_STATE_FNAME} is not readable ({error})") from error
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise UnsafeFileError(f"{COMMON_STATE_FNAME} is damaged, or tries to run code") from error


class _SafePlanner(PlainValues, MCoreLoadPlanner):
    pass
