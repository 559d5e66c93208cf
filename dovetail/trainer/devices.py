"""The devices of a run: what Ray is told, and whether workers compute on GPUs. Decided from what is there, not guessed.

On a cluster the driver's own machine says nothing (a head node often has no GPU): the cluster's resources decide.
"""

from __future__ import annotations

import os
import sys

from dovetail.config import ConfigError
from dovetail.config.errors import Problem
from dovetail.config.root import DovetailConfig
from dovetail.controller import start_ray


def start_cluster(config: DovetailConfig) -> bool:
    """Start a local Ray or join the cluster; returns whether workers get a GPU each."""
    arguments = config.ray_init.init_arguments
    if joins_cluster(config):
        start_ray(**arguments)
        return _cluster_has_gpus(config)
    nodes = {"trainer": config.trainer.nnodes, "actor_rollout_ref.rollout": config.actor_rollout_ref.rollout.nnodes}
    for section, count in nodes.items():
        if count > 1:
            raise _refused(
                f"{section}.nnodes",
                f"{section}.nnodes={count} needs a Ray cluster, and there is no address of one. Run `ray start --head` "
                "on one node and `ray start --address=<head>:6379` on the others, then set ray_init.address=auto (or "
                f"RAY_ADDRESS); on one machine set {section}.nnodes=1.",
            )
    use_gpu = uses_gpu(config)
    world = _num_devices(config)
    if use_gpu:
        _check_enough_gpus(config, arguments.setdefault("num_gpus", _num_local_gpus()), "this machine shows")
    # A local Ray counts slots, not cores: every worker process needs one, and two are left for Ray's own helpers.
    arguments.setdefault("num_cpus", world + 2)
    arguments.setdefault("num_gpus", 0)
    start_ray(**arguments)
    return use_gpu


def joins_cluster(config: DovetailConfig) -> bool:
    """Whether the run uses a Ray that somebody else has started: its devices are known once it is joined."""
    return bool(config.ray_init.address or os.environ.get("RAY_ADDRESS") or _ray_runs_here())


def uses_gpu(config: DovetailConfig) -> bool:
    """Whether the devices of this machine are GPUs. Of a cluster, ask `start_cluster`."""
    device = config.trainer.device
    num_gpus = _num_local_gpus() if device in ("auto", "cuda") else 0
    if device == "cuda" and num_gpus == 0:
        raise _refused(
            "trainer.device",
            "trainer.device=cuda, but this machine shows no GPU "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}). Check nvidia-smi and that torch is "
            "built for CUDA, join a cluster that has GPUs with ray_init.address, or set trainer.device=cpu.",
        )
    return num_gpus > 0


def _cluster_has_gpus(config: DovetailConfig) -> bool:
    import ray

    device = config.trainer.device
    num_gpus = ray.cluster_resources().get("GPU", 0) if device in ("auto", "cuda") else 0
    if num_gpus or device == "cuda":
        _check_enough_gpus(config, num_gpus, "the cluster has")
    return num_gpus > 0


def _check_enough_gpus(config: DovetailConfig, num_gpus: float, who_has: str) -> None:
    needed = _num_devices(config)
    if num_gpus < needed:
        raise _refused(
            "trainer.n_gpus_per_node",
            f"the run needs {needed} GPUs (trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node="
            f"{config.trainer.n_gpus_per_node}, {config.actor_rollout_ref.rollout.own_devices} for engines alone), "
            f"but {who_has} {num_gpus:g}. Lower trainer.n_gpus_per_node, add nodes, or set trainer.device=cpu.",
        )


def _ray_runs_here() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _num_devices(config: DovetailConfig) -> int:
    return config.trainer.world_size + config.actor_rollout_ref.rollout.own_devices


def _num_local_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _refused(key: str, message: str) -> ConfigError:
    return ConfigError([Problem(key, message)])
