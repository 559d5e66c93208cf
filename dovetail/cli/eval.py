"""Evaluate a model: `dovetail eval MODEL --data FILE [key=value ...]`. Accuracy, pass@k, best@k, by data source.

MODEL is a checkpoint (`global_step_N`), a run folder (its newest checkpoint, or with --best its best), a Hugging Face
folder or a hub name.
A checkpoint is evaluated as its run validated: same engine, same reward, same validation files unless --data names
others. Rows are scored by the rule of their `data_source`, or by reward=FILE.py:NAME.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.cli.option_types import number, output_folder, whole_number
from dovetail.config.overrides import split_arguments

if TYPE_CHECKING:
    from dovetail.trainer.evaluate import Evaluation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("inputs", nargs="*", metavar="FILE.yaml|key=value", help="changes to the configuration")
    parser.add_argument("--data", action="append", metavar="FILE", help="prompts with ground truth; may be repeated")
    parser.add_argument(
        "--out", type=output_folder, metavar="FOLDER", help="for eval.json and all responses; runs/eval/<name>"
    )
    parser.add_argument("--ray", action="store_true", help="run workers on Ray even if one process is enough")
    add_sampling_arguments(parser)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="global_step_N, a run folder, a Hugging Face folder, a hub name")
    parser.add_argument("--best", action="store_true", help="the best checkpoint of a run folder (trainer.save_best)")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", "--n", type=whole_number(), metavar="N", help="responses to each prompt (default: the run's, or 1)"
    )
    parser.add_argument(
        "--temperature", type=number(), metavar="T", help="0 is greedy (default: the run's; with n above 1, 1.0)"
    )
    parser.add_argument(
        "--max-tokens",
        type=whole_number(),
        metavar="N",
        help="longest response (default: the run's, or 512, or what fits)",
    )
    parser.add_argument("--verbose", action="store_true", help="log more")


def run(args: argparse.Namespace) -> int:
    set_logging(args.verbose)
    files, overrides = split_arguments(args.inputs)
    from dovetail.trainer.evaluate import evaluate
    from dovetail.trainer.saved_model import find_model, override, sampling_overrides

    model = find_model(args.model, best=args.best)
    if args.data:
        overrides.append(override("data.val_files", args.data))
    out = args.out or Path("runs/eval") / model.name
    overrides += [override("trainer.default_local_dir", str(out)), "trainer.logger=[file]"]
    config = model.config(files, overrides).config
    asked = sampling_overrides(config, n=args.n, temperature=args.temperature, max_tokens=args.max_tokens)
    config = model.config(files, [*overrides, *asked]).config
    use_ray = args.ray or config.trainer.world_size > 1 or not config.actor_rollout_ref.hybrid_engine
    evaluation = evaluate(config, model=model.folder, use_ray=use_ray)
    show(evaluation, model.folder)
    return 0


def set_logging(verbose: bool) -> None:
    """Before torch is imported: worker processes inherit the level."""
    level = "INFO" if verbose else "WARNING"
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("DOVETAIL_LOGGING_LEVEL", level)


def show(evaluation: Evaluation, model: str) -> None:
    """One row for each data source, one column for each score that one of them has."""
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(name for source in evaluation.sources for name in source.scores))
    table = Table(title=model, title_justify="left")
    for heading in ("data source", "prompts", "responses", "value", *names, "tokens", "not scored"):
        table.add_column(heading, justify="left" if heading in ("data source", "value") else "right")
    for source in evaluation.sources:
        scores = [f"{source.scores[name]:.4f}" if name in source.scores else "-" for name in names]
        counts = [str(source.prompts), str(source.responses), source.value]
        table.add_row(source.data_source, *counts, *scores, f"{source.mean_tokens:.1f}", str(source.failed))
    # In a file or a pipe the table keeps its columns, however many there are.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)
    responses = evaluation.folder / "validation" / f"step_{evaluation.step}.jsonl"
    console.print(f"scores: {evaluation.folder / 'eval.json'}\nresponses: {responses}", soft_wrap=True)
