"""The translated examples of the pages for users of AReaL and slime say what the original says."""

from __future__ import annotations

import re

import pytest
import yaml

from dovetail.config import DovetailConfig, load_config
from tests.docs.blocks import blocks_of
from tests.docs.commands import ROOT

pytestmark = pytest.mark.unit


def original_and_translated(page: str) -> tuple[str, DovetailConfig]:
    blocks = [block for block in blocks_of(ROOT / "docs" / "guide" / page) if block.language == "text"]
    [launch] = [block.text for block in blocks if block.title == "launch.txt"]
    loaded = load_config(overrides=[line for line in launch.splitlines() if not line.startswith("#")])
    return blocks[0].text, loaded.config


def test_areals_experiment_is_the_same_run() -> None:
    text, run = original_and_translated("from-areal.md")
    theirs = yaml.safe_load(text.partition("\n\n")[2])
    actor, rollout = run.actor_rollout_ref.actor, run.actor_rollout_ref.rollout
    data, correction = theirs["train_dataset"], run.algorithm.rollout_correction
    assert (run.data.train_batch_size, run.data.max_prompt_length) == (data["batch_size"], data["max_length"])
    generation = {"n_samples": rollout.n, "max_new_tokens": run.data.max_response_length, "temperature": 1.0}
    assert (theirs["gconfig"], rollout.temperature) == (generation, 1.0)
    assert run.data.train_batch_size // actor.ppo_mini_batch_size == theirs["actor"]["ppo_n_minibatches"]
    assert run.staleness_bound == theirs["rollout"]["max_head_offpolicyness"]
    assert (actor.clip_ratio, correction.rollout_is_threshold) == (
        theirs["actor"]["eps_clip"],
        theirs["actor"]["rejection_sampling"]["upper"],
    )
    optimizer = {"lr": actor.optim.lr, "weight_decay": actor.optim.weight_decay}
    assert theirs["actor"]["optimizer"] == {**optimizer, "warmup_steps_proportion": actor.optim.lr_warmup_steps_ratio}
    devices = [int(re.findall(r":d(\d)", theirs[role]["backend"])[0]) for role in ("actor", "rollout")]
    assert devices == [run.trainer.n_gpus_per_node, rollout.n_gpus_per_node]
    assert actor.ppo_max_token_len_per_gpu == theirs["actor"]["mb_spec"]["max_tokens_per_mb"]


def test_slimes_script_is_the_same_run() -> None:
    text, run = original_and_translated("from-slime.md")
    theirs = dict(re.findall(r"--([a-z0-9-]+) ([0-9][0-9.e-]*)", text))
    actor, rollout = run.actor_rollout_ref.actor, run.actor_rollout_ref.rollout
    ours = {
        "rollout-batch-size": run.data.train_batch_size,
        "n-samples-per-prompt": rollout.n,
        "global-batch-size": actor.ppo_mini_batch_size * rollout.n,
        "rollout-max-response-len": run.data.max_response_length,
        "max-tokens-per-gpu": actor.ppo_max_token_len_per_gpu,
        "eps-clip": actor.clip_ratio_low,
        "eps-clip-high": actor.clip_ratio_high,
        "lr": actor.optim.lr,
        "weight-decay": actor.optim.weight_decay,
        "adam-beta2": actor.optim.betas[1],
        "tensor-model-parallel-size": actor.megatron.tensor_model_parallel_size,
        "sglang-mem-fraction-static": rollout.gpu_memory_utilization,
        "num-rollout": run.trainer.total_training_steps,
        "save-interval": run.trainer.save_freq,
        "eval-interval": run.trainer.test_freq,
        "n-samples-per-eval-prompt": rollout.val_kwargs.n,
    }
    assert {name: float(theirs[name]) for name in ours} == ours
