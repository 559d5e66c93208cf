"""How much memory one device has. Never asks a driver: a plan is made on a laptop for a cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dovetail.config.root import DovetailConfig

GIB = 1024**3
# What is planned for when nobody says: the common data-centre card, and the card of the npu recipes.
DEFAULT_GIB = {"cuda": 80.0, "auto": 80.0, "npu": 64.0}
# Driver context, collectives and allocator before the first tensor.
ACCELERATOR_RUNTIME = 1.5 * GIB
# Interpreter and libraries of one CPU worker.
CPU_RUNTIME = 0.6 * GIB


@dataclass(frozen=True)
class Device:
    """One device (or one CPU worker) and what its runtime takes."""

    name: str
    memory_bytes: float
    runtime_bytes: float
    is_accelerator: bool


def plan_device(config: DovetailConfig, memory_gib: float | None = None) -> Device:
    """The device that the plan is made for; `memory_gib` overrides the table."""
    kind = config.trainer.device
    if kind == "cpu":
        workers = config.trainer.n_gpus_per_node
        memory = memory_gib * GIB if memory_gib else _host_memory() / workers
        return Device("CPU worker", memory, CPU_RUNTIME, is_accelerator=False)
    memory = (memory_gib or DEFAULT_GIB[kind]) * GIB
    return Device("NPU" if kind == "npu" else "GPU", memory, ACCELERATOR_RUNTIME, is_accelerator=True)


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
