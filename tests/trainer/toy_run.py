"""A whole run on a tiny random model with a task it can learn, for tests of the trainer.

The model writes random bytes; the reward is the share of plain ASCII characters in what it wrote, so half of the
vocabulary is right and half is wrong, whatever the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.config.root import DovetailConfig
from dovetail.config.tree import nested
from dovetail.data.files import prompt_row, write_rows
from dovetail.observability.run_folder import RunFolder
from dovetail.protocol import DataProto
from dovetail.trainer.prompt_draws import PromptDraws
from dovetail.trainer.replay import NOT_REPEATABLE
from dovetail.trainer.run import RunResult, run_training
from tests.docs.glossary import unexplained
from tests.models.tiny import save_tiny_model
from tests.ranks import run_alone
from tests.ray_workers import quick_workers

PROMPT, RESPONSE = 32, 8

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Share of ASCII characters."""
    return sum(ord(letter) < 128 for letter in solution_str) / max(len(solution_str), 1)


def mostly(data_source, solution_str, ground_truth, extra_info=None):
    """1 when most characters are ASCII: groups of equal scores happen."""
    share = compute_score(data_source, solution_str, ground_truth)
    return {"score": float(share >= 0.625), "acc": share >= 0.625, "pred": solution_str[:1]}
'''


def numbered_prompts(count: int, token_ids: list[int]) -> Callable[[], DataProto]:
    """Draws of `count` equal prompts, for a stream."""
    draws, prompts = PromptDraws(0), np.empty(count, dtype=object)
    prompts[:] = [token_ids] * count
    return lambda: draws.number(DataProto.from_dict({"index": torch.arange(count)}, {"raw_prompt_ids": prompts}))


def save_toy_model(folder: Path, *, seed: int = 0) -> Path:
    """Two layers of width 64, vocabulary of bytes."""
    return save_tiny_model("qwen2", folder, seed=seed, hidden_size=64, intermediate_size=96)


def toy_rows(count: int, first: int = 0, question: str = "say") -> list[dict[str, Any]]:
    facts = {"data_source": "toy", "ground_truth": "", "ability": "toy"}
    return [prompt_row(question=f"{question} {first + i}", extra_info={"index": i}, **facts) for i in range(count)]


def save_toy_data(folder: Path, count: int = 32) -> Path:
    """`train.parquet`, `val.parquet` and the reward file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    for name, first, number in (("train", 0, count), ("val", 1000, 4)):
        write_rows(toy_rows(number, first), folder / f"{name}.parquet")
    return folder


@dataclass(frozen=True)
class Toy:
    """Where the model and the data are."""

    model: Path
    data: Path

    def keys(self, run: Path, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Dotted keys of a run: GRPO, 4 prompts x 4 answers, two mini-batches, three steps, float32."""
        keys: dict[str, Any] = {
            "data.train_files": str(self.data / "train.parquet"),
            "data.max_prompt_length": PROMPT,
            "data.max_response_length": RESPONSE,
            "data.train_batch_size": 4,
            "actor_rollout_ref.model.path": str(self.model),
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "float32",
            "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": "float32",
            "actor_rollout_ref.rollout.dtype": "float32",
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.rollout.calculate_log_probs": True,
            "critic.optim.lr": 1e-3,
            "critic.fsdp_config.mixed_precision.param_dtype": "float32",
            "critic.model.enable_gradient_checkpointing": False,
            "algorithm.adv_estimator": "grpo",
            "custom_reward_function.path": str(self.data / "reward.py"),
            "reward_model.num_workers": 1,  # a process to start for each
            "trainer.default_local_dir": str(run),
            "trainer.total_training_steps": 3,
            "trainer.n_gpus_per_node": 1,
            "trainer.device": "cpu",
            "trainer.val_before_train": False,
            "trainer.logger": ["file"],
        }
        return keys | dict(changes or {})

    def config(self, run: Path, changes: Mapping[str, Any] | None = None) -> DovetailConfig:
        """The keys as a configuration."""
        return DovetailConfig(**nested(self.keys(run, changes)))

    def arguments(self, run: Path, changes: Mapping[str, Any] | None = None) -> list[str]:
        """The keys as a launch line has them."""
        return [
            f"{key}=[{','.join(value)}]" if isinstance(value, list) else f"{key}={value}"
            for key, value in self.keys(run, changes).items()
        ]


DAPO: dict[str, Any] = {
    "algorithm.filter_groups.enable": True,
    "algorithm.filter_groups.metric": "acc",
    "algorithm.filter_groups.max_num_gen_batches": 4,
    "data.gen_batch_size": 12,
    "custom_reward_function.name": "mostly",
    "actor_rollout_ref.actor.clip_ratio_high": 0.28,
}
"""Dynamic sampling with a reward of 0 or 1; 12 prompts a round leave groups over."""


def train(config: DovetailConfig, *, use_ray: bool = False) -> tuple[RunResult, list[dict[str, Any]]]:
    """Run it in this process and read its metrics back.

    A signal that no test sends is for the tests, as that of `timeout` at its limit: without this the run would take it
    as its own, and some test would fail in its place.
    """
    result = run_training(config, use_ray=use_ray)
    if result.stopped_by is not None:
        pytest.exit(f"a run was stopped by signal {result.stopped_by}, which came from outside")
    metrics = RunFolder(result.folder).read_metrics()
    unknown = unexplained({name for row in metrics for name in row})
    assert not unknown, f"docs/metrics.md does not explain {unknown}"
    return result, metrics


def make_toy(folder: Path) -> Toy:
    """The model and the data, in `folder`."""
    return Toy(save_toy_model(folder / "model"), save_toy_data(folder / "data"))


def train_apart(
    folder: Path, changes: Mapping[str, Any], *, use_ray: bool = False, make: Callable[[Path], Toy] = make_toy
) -> Path:
    """The folder of a run in a process of its own, on a model and data of its own."""
    run_alone(_train_here, folder, with_quick_workers(changes) if use_ray else changes, use_ray, make, timeout=600.0)
    return folder / "run"


def with_quick_workers(changes: Mapping[str, Any]) -> dict[str, Any]:
    """For a run on Ray whose workers' start is not what the test is about."""
    return {**changes, "ray_init.runtime_env": quick_workers()}


def _train_here(
    rank: int, world_size: int, folder: Path, changes: Mapping[str, Any], use_ray: bool, make: Callable[[Path], Toy]
) -> None:
    train(make(folder).config(folder / "run", changes), use_ray=use_ray)


def repeatable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without clocks and memory."""
    return [{name: value for name, value in row.items() if not name.startswith(NOT_REPEATABLE)} for row in rows]
