"""Pick a backend by ``strategy`` and put its parts together: precision, mesh, sharding, optimizer, schedule."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from dovetail.backends.base import RankInfo
from dovetail.backends.optimizer import build_optimizer, decayed_names, muon_names
from dovetail.backends.schedule import LearningRateSchedule, learning_rate
from dovetail.backends.sharding import Precision, Sharding, is_meta
from dovetail.backends.torch_backend import TorchBackend
from dovetail.config.fsdp import FSDPConfig, full_dtype
from dovetail.config.optim import OptimConfig
from dovetail.models.backbone import TransformerBackbone
from dovetail.parallel.mesh import ParallelMesh, create_parallel_mesh

SHARDINGS: dict[str, str] = {
    "single": "dovetail.backends.single:SingleProcess",
    "fsdp": "dovetail.backends.fsdp1:Fsdp1Sharding",
    "fsdp2": "dovetail.backends.fsdp2:Fsdp2Sharding",
}
"""By strategy: a class called with `(network, precision, device, mesh, fsdp)`, imported when it is asked for."""


def build_backend(
    strategy: str,
    network: TransformerBackbone,
    *,
    weights: Path | None = None,
    adapter: Path | None = None,
    fsdp: FSDPConfig,
    optim: OptimConfig | None = None,
    max_grad_norm: float = 1.0,
    sp_size: int = 1,
    offload_activations: bool = False,
    device: torch.device | str = "cpu",
) -> TorchBackend:
    """A backend for ``network``, which is taken over (sharded in place). ``optim=None`` builds one for inference.

    A network on the meta device is given memory shard by shard and filled from the Hugging Face folder ``weights``,
    its LoRA matrices from the folder ``adapter``.
    For ``fsdp`` and ``fsdp2`` the default process group must exist; every rank calls this with an equal network.
    """
    if strategy not in SHARDINGS:
        raise ValueError(f"strategy={strategy!r} is not one of {', '.join(SHARDINGS)}")
    device = torch.device(device)
    precision = precision_of(fsdp, trains=optim is not None)
    mesh = None
    if strategy != "single":
        mesh = create_parallel_mesh(device.type, fsdp_size=fsdp.fsdp_size, sp_size=sp_size)
    elif sp_size != 1:
        raise ValueError(f"ulysses_sequence_parallel_size={sp_size} needs strategy fsdp or fsdp2, not single")
    if is_meta(network) and weights is None:
        raise ValueError("the network is on the meta device and has no weights; pass weights=<folder of safetensors>")
    for parameter in network.parameters():  # not network.to(): rotary frequencies must stay in float32
        parameter.data = parameter.data.to(precision.master)
    decayed, matrices = decayed_names(network), muon_names(network)
    module, _, name = SHARDINGS[strategy].partition(":")
    sharding: Sharding = getattr(importlib.import_module(module), name)(network, precision, device, mesh, fsdp)
    if weights is not None:
        sharding.load_weights(weights, adapter)
    optimizer = schedule = None
    if optim is not None:
        optimizer = build_optimizer(sharding.named_parameters(), optim, decayed=decayed, matrices=matrices)
        schedule = LearningRateSchedule(optimizer, lambda step: learning_rate(step, optim, optim.total_training_steps))
    return TorchBackend(
        sharding,
        network,
        device=device,
        rank_info=RankInfo() if mesh is None else rank_info_of(mesh),
        dp_group=None if mesh is None else mesh.dp_group,
        sp_group=None if mesh is None else mesh.sp_group,
        optimizer=optimizer,
        schedule=schedule,
        max_grad_norm=max_grad_norm,
        offload_activations=offload_activations,
    )


def precision_of(fsdp: FSDPConfig, *, trains: bool) -> Precision:
    """Dtypes from their names. Weights that are never trained are kept in the dtype they compute in."""
    mixed = fsdp.mixed_precision
    master, compute, reduce = (
        getattr(torch, full_dtype(name)) for name in (fsdp.model_dtype, mixed.param_dtype, mixed.reduce_dtype)
    )
    if trains and torch.float16 in (master, compute):
        raise ValueError("float16 training needs loss scaling, which this backend does not do; use bfloat16 or float32")
    return Precision(master=master if trains else compute, compute=compute, reduce=reduce)


def rank_info_of(mesh: ParallelMesh) -> RankInfo:
    return RankInfo(
        rank=mesh.rank,
        world_size=mesh.world_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        sp_rank=mesh.sp_rank,
        sp_size=mesh.sp_size,
        is_collected=mesh.sp_rank == 0,
    )
