"""Resolve a configuration without starting anything: notices, the plan, and a verdict.

  dovetail check model=models/policy data=prompts.jsonl reward=gsm8k
  dovetail check recipe.yaml trainer.nnodes=2
  dovetail check --overrides-file launch.txt actor_rollout_ref.model.path=~/models/Qwen2.5-7B
  dovetail check recipe.yaml async_training.mode=fully_async --like runs/synchronous

Reads what a run reads before its first process: models with their weights, rows, reward functions. With
--no-files it plans for another machine, in half a second.

Exit code 0: the configuration is valid, what it names can be used, and it fits. 2: it cannot run, and every problem is
listed. 3: it is valid and needs more memory than a device has.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.cli.option_types import number
from dovetail.config.checks import check_config
from dovetail.config.errors import ConfigError, Notice, Problem
from dovetail.config.load import LoadedConfig, load_config
from dovetail.config.overrides import split_arguments
from dovetail.config.plan import Plan, make_plan, read_shapes
from dovetail.config.root import DovetailConfig
from dovetail.trainer.async_plan import AsyncPlan, RecordsError, make_async_plan
from dovetail.trainer.choose import choose_open_keys, gpu_gib
from dovetail.trainer.inputs import missing_inputs

if TYPE_CHECKING:
    from dovetail.trainer.run_speeds import RunRecords

VALID, INVALID, TOO_BIG = 0, 2, 3


@dataclass(frozen=True)
class Checked:
    """What is said about a configuration."""

    plan: Plan | None = None
    notices: Sequence[Notice] = ()
    problems: Sequence[Problem] = ()
    schedule: AsyncPlan | None = None
    choices: Sequence[Notice] = ()
    looked_at: str = ""

    @property
    def exit_code(self) -> int:
        if _errors(self.problems):
            return INVALID
        memory = self.plan.memory if self.plan else None
        return TOO_BIG if memory is not None and not memory.fits else VALID

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "valid": self.exit_code != INVALID,
            "chosen": [{"key": choice.key, "message": choice.message} for choice in self.choices],
            "problems": [{"severity": p.severity, "key": p.key, "message": p.message} for p in self.problems],
            "notices": [{"key": notice.key, "message": notice.message} for notice in self.notices],
            "plan": self.plan.to_dict() if self.plan else None,
            "looked_at": self.looked_at,
            "async": self.schedule.to_dict() if self.schedule else None,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Files, overrides, and what the plan is made for."""
    parser.add_argument("items", nargs="*", metavar="FILE | key=value", help="YAML files and overrides, in this order")
    parser.add_argument(
        "--overrides-file", action="append", default=[], metavar="F", help="file with one override per line"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text for people, json for programs")
    parser.add_argument(
        "--no-files",
        action="store_true",
        help="plan for another machine: do not look for data, models, reward functions and libraries here",
    )
    parser.add_argument(
        "--device-memory-gib",
        type=number(above=True),
        metavar="GIB",
        help="memory of one device (default: that of this machine's GPU, 80 without one; on a CPU: this machine's, "
        "shared by its workers)",
    )
    parser.add_argument(
        "--like",
        type=Path,
        metavar="RUN",
        help="predict an asynchronous run from the lengths and speeds of this synchronous one",
    )
    parser.add_argument(
        "--lengths",
        type=_lengths,
        metavar="MEDIAN,P99",
        help="with --like: log-normal response lengths in place of that run's",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan and the verdict."""
    files, overrides = split_arguments(args.items)
    try:
        loaded = load_config(files, overrides, overrides_files=args.overrides_file)
        loaded = choose_open_keys(
            loaded,
            look_at_files=not args.no_files,
            # Of an RL run in full keys a plan is for any machine, and is made without torch.
            look_at_machine=loaded.fits_open_keys and not args.no_files,
            device_memory_gib=args.device_memory_gib,
        )
    except ConfigError as error:
        checked = Checked(problems=error.problems)
    else:
        memory, look = args.device_memory_gib, not args.no_files
        checked = check(loaded, memory, look_for_files=look, like=args.like, lengths=args.lengths)
    if args.format == "json":
        sys.stdout.write(json.dumps(checked.to_dict(), indent=2) + "\n")
    else:
        from dovetail.cli.show_plan import show

        show(checked)
    return checked.exit_code


def check(
    loaded: LoadedConfig,
    device_memory_gib: float | None = None,
    *,
    look_for_files: bool = True,
    like: Path | None = None,
    lengths: tuple[float, float] | None = None,
) -> Checked:
    """Look at a loaded configuration from all sides."""
    config, shapes = loaded.config, read_shapes(loaded.config)
    notices = [*loaded.notices, *(Notice(text.split("=")[0], text) for text in shapes.notices)]
    problems = [*(missing_inputs(config) if look_for_files else []), *check_config(config, shapes.policy)]
    looked_at = ""
    if look_for_files and not _errors(problems):
        from dovetail.trainer.preflight import LOOKED_AT, unusable_inputs  # torch and transformers: seconds

        found = unusable_inputs(config)
        refused = [problem for problem in found if problem.severity != "notice"]
        problems += refused
        notices += [Notice(one.key, one.message) for one in found if one.severity == "notice"]
        looked_at = "" if refused else LOOKED_AT
        device_memory_gib = device_memory_gib or gpu_gib(config)
    if _errors(problems):
        return Checked(None, notices, problems, None, loaded.choices, looked_at)
    plan, schedule = make_plan(config, shapes, device_memory_gib=device_memory_gib), None
    if config.async_training.mode != "off":
        try:
            schedule = make_async_plan(config, None if like is None else _records(config, like, lengths))
        except RecordsError as error:
            problems.append(Problem("--like", str(error)))
    elif like is not None:
        why = f"--like {like} predicts an asynchronous run; set async_training.mode, or leave it out."
        problems.append(Problem("--like", why))
    return Checked(plan, notices, problems, schedule, loaded.choices, looked_at)


def _errors(problems: Sequence[Problem]) -> bool:
    return any(problem.severity == "error" for problem in problems)


def _records(config: DovetailConfig, like: Path, lengths: tuple[float, float] | None) -> RunRecords:
    from dovetail.trainer.run_speeds import long_tailed_groups, read_records  # imports numpy

    records = read_records(like.expanduser())
    if lengths is None:
        return records
    rollout = config.actor_rollout_ref.rollout
    return replace(records, groups=long_tailed_groups(*lengths, n=rollout.n, longest=rollout.response_length))


def _lengths(text: str) -> tuple[float, float]:
    median, _, p99 = text.partition(",")
    try:
        values = float(median), float(p99)
    except ValueError:
        values = 0.0, 0.0
    if not 1 <= values[0] <= values[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a median and a 99th percentile in tokens, such as 200,2000.")
    return values
