"""What `dovetail doctor --cluster` tests: how many devices there are, where, and the files its runs share."""

from __future__ import annotations

import importlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.config.load import load_config
from dovetail.config.root import DovetailConfig

MODEL, DATA, REWARD = "model", "prompts.parquet", "reward.py"
_REWARD = '''"""The share of ASCII characters in a response."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(ord(letter) < 128 for letter in solution_str) / max(len(solution_str), 1)
'''
# float32 everywhere: a difference is then an error, not rounding, and CPUs without bfloat16 units are not slow.
EXACT = (
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32",
    "actor_rollout_ref.actor.megatron.dtype=float32",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "trainer.float32_matmul_precision=highest",
)


@dataclass(frozen=True)
class Site:
    """`folder` must be the same folder on every node."""

    folder: Path
    device: str
    num_nodes: int
    devices_per_node: int
    overrides: tuple[str, ...] = ()
    """What the user gave: `ray_init.address=auto`, a model of their own."""

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    def config(self, *changes: str, devices: int | None = None) -> DovetailConfig:
        """A small float32 run on all devices, or on the first `devices` of one node."""
        nodes, each = (self.num_nodes, self.devices_per_node) if devices is None else (1, devices)
        placement = (f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={each}", f"trainer.device={self.device}")
        model = f"actor_rollout_ref.model.path={self.folder / MODEL}"
        return load_config([], [*EXACT, model, *placement, *self.overrides, *changes]).config

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "folder": str(self.folder), "overrides": list(self.overrides)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Site:
        changed: dict[str, Any] = {"folder": Path(values["folder"]), "overrides": tuple(values["overrides"])}
        return cls(**(values | changed))


def prepare(folder: Path) -> None:
    """The model, the prompts and the reward of the runs."""
    from dovetail.data.files import prompt_row, write_rows
    from dovetail.demo.toy import save_toy_model

    save_toy_model(folder / MODEL)
    (folder / REWARD).write_text(_REWARD)
    rows = [
        prompt_row(
            data_source="doctor", question=f"say {number}", ground_truth="", ability="", extra_info={"index": number}
        )
        for number in range(64)
    ]
    write_rows(rows, folder / DATA)


def node_facts(folder: str) -> dict[str, object]:
    """Versions that must agree on all nodes, and whether `folder` is there."""
    # Of what is imported, not of what is installed: a source folder on PYTHONPATH has no metadata.
    versions = {
        name: importlib.import_module(name).__version__ for name in ("torch", "transformers", "ray", "dovetail")
    }
    return {"python": platform.python_version(), **versions, "sees_folder": os.path.isdir(folder)}
