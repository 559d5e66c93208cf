"""Measure this machine: `dovetail bench [FILE.yaml ...] key=value ...`.

Runs the engine and the trainer of a configuration on random prompts and responses of full length, and prints seconds,
tokens per second, the share of the device's peak, and memory beside the plan.

Without a model it makes a small one with random weights, which takes about a minute.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.cli.option_types import whole_number
from dovetail.config import load_config
from dovetail.config.overrides import split_arguments

if TYPE_CHECKING:
    from dovetail.config.root import DovetailConfig
    from dovetail.doctor.bench import BenchResult

_FORCED = (
    "actor_rollout_ref.rollout.ignore_eos=True",
    "trainer.resume_mode=disable",
    "data.train_files=not-read",  # a run must name one
)
_MODEL_KEY = "actor_rollout_ref.model.path"
# For a machine of which nothing is known: seconds on two cores, and every part of a step is in it.
_SMALL = (
    "data.train_batch_size=8",
    "data.max_prompt_length=64",
    "data.max_response_length=64",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    "trainer.n_gpus_per_node=1",
)
# A Llama of 15 M parameters.
_SIZES: dict[str, int] = {"vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8}
_SIZES |= {"num_attention_heads": 6, "max_position_embeddings": 4096}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="*", metavar="FILE|key=value", help="YAML files and overrides")
    parser.add_argument(
        "--overrides-file", action="append", default=[], type=Path, metavar="F", help="file with one override per line"
    )
    parser.add_argument(
        "--steps", type=whole_number(), default=3, help="measured steps, after one that warms up (default 3)"
    )
    parser.add_argument("--ray", action="store_true", help="run workers on Ray even if one process is enough")


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    files, overrides = split_arguments(args.inputs)
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as folder:
        small: list[str] = []
        if not files and not args.overrides_file and not any(text.startswith(f"{_MODEL_KEY}=") for text in overrides):
            from dovetail.demo.toy import save_toy_model

            save_toy_model(Path(folder), **_SIZES)
            small = [*_SMALL, f"{_MODEL_KEY}={folder}"]
        # Later overrides win: what the user says stands over the small run, a full answer stands over both.
        config = load_config(files, [*small, *overrides, *_FORCED], overrides_files=args.overrides_file).config
        from dovetail.doctor.bench import bench_training

        result = bench_training(config, steps=args.steps, use_ray=args.ray or config.trainer.world_size > 1)
    show(config, result)
    return 0


def show(config: DovetailConfig, result: BenchResult) -> None:
    """The table, and one line that says what to make of it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{config.actor_rollout_ref.rollout.name} engine, {config.actor_rollout_ref.actor.strategy}")
    for heading in ("phase", "seconds", "tokens/s", "of the peak", "planned GiB"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for phase in result.phases:
        table.add_row(
            phase.name,
            f"{phase.seconds:.3f}",
            f"{phase.tokens_per_second:,.0f}",
            "-" if phase.mfu is None else f"{phase.mfu:.1%}",
            "-" if phase.planned_gib is None else f"{phase.planned_gib:.1f}",
        )
    console = Console(highlight=False)
    console.print(table)
    longest = max(result.phases, key=lambda phase: phase.seconds)
    console.print(
        f"One step takes {result.step_s:.2f} s without data and rewards, {longest.seconds / result.step_s:.0%} of it "
        f"in {longest.name}; the first took {result.warm_up_s:.2f} s."
    )
    if result.peak_gib is not None:
        console.print(f"Most memory in use while training: {result.peak_gib:.1f} GiB.")
