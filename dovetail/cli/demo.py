"""The plan of a small GRPO recipe for a laptop, from its sizes alone: no model, no GPU, nothing is trained."""

from __future__ import annotations

import argparse
import sys

from dovetail.cli.check import report
from dovetail.config.load import load_config
from dovetail.config.plan import Shapes, shape_from_config

# SmolLM2-135M-Instruct, as its config.json states it.
SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
RECIPE = (
    "data.train_files=gsm8k/train.parquet",
    "data.val_files=gsm8k/test.parquet",
    "data.max_prompt_length=256",
    "data.max_response_length=256",
    "data.train_batch_size=8",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.model.path=SmolLM2-135M-Instruct",
    "actor_rollout_ref.actor.strategy=single",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "trainer.n_gpus_per_node=1",
    "trainer.device=cpu",
    "trainer.total_training_steps=20",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Overrides of the recipe."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the recipe")


def run(args: argparse.Namespace) -> int:
    """Print the recipe's plan; the exit code is that of `dovetail check`."""
    loaded = load_config(overrides=[*RECIPE, *args.overrides])
    code = report(loaded.config, Shapes(policy=shape_from_config(SMOLLM2_135M)), list(loaded.notices))
    sys.stdout.write("\nThis is the plan of a run; this version checks and plans, and does not train yet.\n")
    return code
