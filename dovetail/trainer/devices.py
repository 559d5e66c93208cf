"""The devices of a run: the resources Ray starts with, and whether workers compute on GPUs. Detected, never guessed.

On a cluster the driver's own machine says nothing (a head node often has no GPU): the cluster's resources decide.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings

from dovetail.config import ConfigError
from dovetail.config.errors import Problem
from dovetail.config.fsdp import full_dtype
from dovetail.config.root import DovetailConfig
from dovetail.controller import start_ray
from dovetail.trainer.inputs import no_gpu

logger = logging.getLogger(__name__)

_SLOW = 20.0
"""Times. With units for it bfloat16 is as fast as float32 or faster; emulated it is hundreds of times slower."""


def start_cluster(config: DovetailConfig, *, generates: bool = True) -> bool:
    """Start a local Ray or join the cluster; returns whether workers get a GPU each.

    A replay does not generate: engines with devices of their own need none.
    """
    arguments = config.ray_init.init_arguments
    if joins_cluster(config):
        start_ray(**arguments)
        return _cluster_has_gpus(config, generates=generates)
    use_gpu = refuse_missing_devices(config, generates=generates)
    if use_gpu:
        arguments.setdefault("num_gpus", _num_local_gpus())
    # A local Ray counts slots, not cores: every worker process needs one, and two are left for Ray's own helpers.
    arguments.setdefault("num_cpus", config.num_devices + 2)
    arguments.setdefault("num_gpus", 0)
    start_ray(**arguments)
    return use_gpu


def refuse_missing_devices(config: DovetailConfig, *, generates: bool = True) -> bool:
    """Raise for nodes and GPUs that this machine has not, where no cluster is joined; returns `uses_gpu`."""
    nodes = {"trainer": config.trainer.nnodes, "distill.teacher": config.distill.teacher.nnodes}
    if generates:
        nodes["actor_rollout_ref.rollout"] = config.actor_rollout_ref.rollout.nnodes
    for section, count in nodes.items():
        if count > 1:
            raise _refused(
                f"{section}.nnodes",
                f"{section}.nnodes={count} needs a Ray cluster, and there is no address of one. Run `ray start --head` "
                "on one node and `ray start --address=<head>:6379` on the others, then set ray_init.address=auto (or "
                "RAY_ADDRESS). Ray 2.60 and newer ask for a token: `ray get-auth-token --generate` on the first node, "
                "and ~/.ray/auth_token on every node (or RAY_AUTH_MODE=disabled on a network that only you reach). "
                f"On one machine set {section}.nnodes=1.",
            )
    use_gpu = uses_gpu(config)
    if use_gpu:
        given = config.ray_init.init_arguments.get("num_gpus")
        shown = _num_local_gpus() if given is None else given
        _check_enough_gpus(config, shown, "this machine shows", generates=generates)
    return use_gpu


def joins_cluster(config: DovetailConfig) -> bool:
    """Whether the run uses a Ray that somebody else has started: its devices are known once it is joined."""
    return bool(config.ray_init.address or os.environ.get("RAY_ADDRESS") or ray_runs_here())


def uses_gpu(config: DovetailConfig) -> bool:
    """Whether the devices of this machine are GPUs. Of a cluster, ask `start_cluster`."""
    device = config.trainer.device
    num_gpus = _num_local_gpus() if device in ("auto", "cuda") else 0
    if device == "cuda" and num_gpus == 0:
        raise no_gpu()
    if num_gpus == 0:
        _refuse_gpu_tools(config)
    return num_gpus > 0


def _refuse_gpu_tools(config: DovetailConfig) -> None:
    """With `trainer.device=auto` only the machine can say that there is no GPU to record."""
    profiler = config.global_profiler
    if profiler.tool == "torch_memory" and profiler.chosen_steps:
        raise _refused(
            "global_profiler.tool",
            "global_profiler.tool=torch_memory records the memory of GPUs, and the run computes on the CPU; use torch, "
            "or take global_profiler.steps out.",
        )


def warn_of_slow_bfloat16(config: DovetailConfig) -> None:
    """Many CPUs have no units for it, and torch then computes it one number at a time. Timed, not looked up."""
    policy = config.actor_rollout_ref
    keys = {}
    if config.trainer.method != "reward":
        keys["actor_rollout_ref.actor"] = policy.actor.compute_dtype
    if config.uses_critic:
        keys["critic"] = config.critic.compute_dtype
    keys = {f"{section}.fsdp_config.mixed_precision.param_dtype": dtype for section, dtype in keys.items()}
    if config.uses_engine:
        keys["actor_rollout_ref.rollout.dtype"] = policy.rollout.dtype
    asked = [key for key, dtype in keys.items() if full_dtype(dtype) == "bfloat16"]
    if not asked or (ratio := _bfloat16_against_float32()) < _SLOW:
        return
    changes = " ".join(f"{key}=float32" for key in asked)
    logger.warning("bfloat16 is %.0f times slower than float32 on this CPU; set %s", ratio, changes)


def _bfloat16_against_float32() -> float:
    """Seconds of a small linear layer in bfloat16 over those in float32; the fastest of three."""
    import torch

    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        rows, weight = torch.ones(16, 256, dtype=dtype), torch.ones(512, 256, dtype=dtype)
        took = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says at length which kernel it fell back from
            for _ in range(3):
                start = time.perf_counter()
                torch.nn.functional.linear(rows, weight)
                took.append(time.perf_counter() - start)
        seconds[dtype] = min(took)
    return seconds[torch.bfloat16] / seconds[torch.float32]


def _cluster_has_gpus(config: DovetailConfig, *, generates: bool) -> bool:
    import ray

    device = config.trainer.device
    num_gpus = ray.cluster_resources().get("GPU", 0) if device in ("auto", "cuda") else 0
    if num_gpus or device == "cuda":
        _check_enough_gpus(config, num_gpus, "the cluster has", generates=generates)
    if num_gpus == 0:
        _refuse_gpu_tools(config)
    return num_gpus > 0


def _check_enough_gpus(config: DovetailConfig, num_gpus: float, who_has: str, *, generates: bool) -> None:
    for_engines = config.actor_rollout_ref.rollout.own_devices if generates else 0
    needed = config.trainer.world_size + for_engines + config.teacher_devices
    if num_gpus < needed:
        raise _refused(
            "trainer.n_gpus_per_node",
            f"the run needs {needed} GPUs (trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node="
            f"{config.trainer.n_gpus_per_node}, {for_engines} for engines alone, "
            f"{config.teacher_devices} for a teacher alone), "
            f"but {who_has} {num_gpus:g}. Lower trainer.n_gpus_per_node, add nodes, or set trainer.device=cpu.",
        )


def ray_runs_here() -> bool:
    """Whether somebody has started or joined a Ray in this process."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _num_local_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _refused(key: str, message: str) -> ConfigError:
    return ConfigError([Problem(key, message)])
