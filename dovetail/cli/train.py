"""Train: `dovetail train [FILE.yaml ...] key=value ...`. Runs on the GPUs of this machine, or on its CPU.

  dovetail train model=Qwen/Qwen2.5-0.5B-Instruct data=prompts.jsonl reward=my_reward.py:score

Three things are enough; the rest is chosen to fit, and `dovetail check` with the same words shows what and why.
With `algorithm.filter_groups.enable=True` groups without signal are generated anew (DAPO).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from dovetail.config import ConfigError, load_config
from dovetail.config.overrides import split_arguments
from dovetail.trainer.choose import choose_open_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="*", metavar="FILE|key=value", help="YAML files and overrides")
    parser.add_argument("--overrides-file", action="append", default=[], type=Path, metavar="F", help="a launch list")
    parser.add_argument("--local", action="store_true", help="one process, no Ray: a debugger works")
    parser.add_argument("--verbose", action="store_true", help="log what the parts do")


def run(args: argparse.Namespace, method: str | None = None) -> int:
    """`method` is that of a command of its own, such as `dovetail sft`; without one, `trainer.method` says it."""
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    os.environ.setdefault("DOVETAIL_LOGGING_LEVEL", "INFO" if args.verbose else "WARNING")
    files, overrides = split_arguments(args.inputs)
    if method is not None:
        overrides = [*overrides, f"trainer.method={method}"]
    try:
        loaded = load_config(files, overrides, overrides_files=args.overrides_file)
        loaded = choose_open_keys(loaded, one_process=args.local)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for notice in loaded.notices:
        sys.stderr.write(f"notice: {notice.key}: {notice.message}\n")
    for choice in loaded.choices:
        sys.stderr.write(f"chosen: {choice.message}\n")
    # Heavy imports come after the configuration is known to be right.
    from dovetail.trainer.run import exit_code_of, run_training

    return exit_code_of(lambda: run_training(loaded.config, use_ray=not args.local), loaded.config)
