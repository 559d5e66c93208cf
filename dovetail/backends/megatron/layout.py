"""Which part of a model, and which rows of a batch, this process holds under Megatron. Makes the process groups, once.

Megatron keeps its groups in module globals, so there is one layout for each process: roles that share a process share
it, and another one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from dovetail.backends.base import RankInfo
from dovetail.config.megatron import MegatronConfig


@dataclass(frozen=True)
class MegatronLayout:
    """Sizes and this rank's places. `tp` shares layers, `pp` stages, `cp` sequences, `ep` experts, `etp` one expert;
    `dp` ranks read different rows. `vpp_size` counts model chunks on a stage."""

    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    vpp_size: int
    cp_size: int
    cp_rank: int
    ep_size: int
    ep_rank: int
    etp_size: int
    etp_rank: int
    dp_size: int
    dp_rank: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    ep_group: dist.ProcessGroup
    etp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    """Ranks with equal dense parameters: who reduces gradients together."""

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def rank_info(self) -> RankInfo:
        """Rows are given by `dp_rank`; one rank of those that hold the same rows answers."""
        is_first = self.tp_rank == 0 and self.is_first_stage
        return RankInfo(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            sp_rank=self.cp_rank,
            sp_size=self.cp_size,
            is_collected=is_first and self.cp_rank == 0,
        )


def create_layout(config: MegatronConfig, device: torch.device) -> MegatronLayout:
    """Make Megatron's process groups over the default one (a world of one makes that too). All ranks call it alike."""
    from megatron.core import parallel_state

    _join_a_world_of_one(device)
    world = dist.get_world_size()
    if world % config.model_parallel_size:
        raise ValueError(
            f"TP {config.tensor_model_parallel_size} x PP {config.pipeline_model_parallel_size} x CP "
            f"{config.context_parallel_size} does not divide the {world} processes of the group; choose sizes whose "
            f"product is a divisor of {world}."
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=_virtual_size(config),
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_size,
        )
    layout = _layout_in_use(_virtual_size(config) or 1)
    _check_equal(layout, config)
    return layout


def _virtual_size(config: MegatronConfig) -> int | None:
    virtual = config.virtual_pipeline_model_parallel_size
    # One chunk a stage is no interleaving, and Megatron refuses to be told so.
    return virtual if virtual is not None and virtual > 1 and config.pipeline_model_parallel_size > 1 else None


def _layout_in_use(vpp_size: int) -> MegatronLayout:
    from megatron.core import parallel_state as state

    return MegatronLayout(
        tp_size=state.get_tensor_model_parallel_world_size(),
        tp_rank=state.get_tensor_model_parallel_rank(),
        pp_size=state.get_pipeline_model_parallel_world_size(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        vpp_size=vpp_size,
        cp_size=state.get_context_parallel_world_size(),
        cp_rank=state.get_context_parallel_rank(),
        ep_size=state.get_expert_model_parallel_world_size(),
        ep_rank=state.get_expert_model_parallel_rank(),
        etp_size=state.get_expert_tensor_parallel_world_size(),
        etp_rank=state.get_expert_tensor_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        dp_rank=state.get_data_parallel_rank(),
        tp_group=state.get_tensor_model_parallel_group(),
        pp_group=state.get_pipeline_model_parallel_group(),
        cp_group=state.get_context_parallel_group(),
        ep_group=state.get_expert_model_parallel_group(),
        etp_group=state.get_expert_tensor_parallel_group(),
        dp_group=state.get_data_parallel_group(),
        dp_cp_group=state.get_data_parallel_group(with_context_parallel=True),
    )


def _check_equal(layout: MegatronLayout, config: MegatronConfig) -> None:
    wanted = {
        "tensor_model_parallel_size": (config.tensor_model_parallel_size, layout.tp_size),
        "pipeline_model_parallel_size": (config.pipeline_model_parallel_size, layout.pp_size),
        "context_parallel_size": (config.context_parallel_size, layout.cp_size),
        "expert_model_parallel_size": (config.expert_model_parallel_size, layout.ep_size),
        "expert_tensor_parallel_size": (config.expert_tensor_size, layout.etp_size),
    }
    for name, (asked, used) in wanted.items():
        if asked != used:
            raise ValueError(
                f"megatron.{name}={asked} and a role in this process has {used} already; Megatron has one layout for "
                "each process, so give all roles on Megatron the same sizes."
            )


def _join_a_world_of_one(device: torch.device) -> None:
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
