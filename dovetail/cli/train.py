"""Train a policy with RL: `dovetail train [FILE.yaml ...] key=value ...`. Runs on the GPUs of this machine, or its CPU.

  dovetail train model=Qwen/Qwen2.5-0.5B-Instruct data=prompts.jsonl reward=my_reward.py:score

With these three short names the algorithm is GRPO and the other settings are chosen; `dovetail check` with the same
arguments lists them with reasons. `algorithm.adv_estimator` names another algorithm: see docs/guide/choosing.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dovetail.cli.eval import set_logging
from dovetail.config import load_config
from dovetail.config.overrides import split_arguments
from dovetail.trainer.choose import choose_open_keys

DESCRIPTIONS = {
    "sft": """\
Fine-tune on conversations: `dovetail sft [FILE.yaml ...] key=value ...`. The loss is on the assistant's tokens only.

  dovetail sft model=~/models/Qwen2.5-0.5B data=chats.jsonl

Rows have `messages` (with `tools`), or a prompt and a response: see docs/sft.md. Launch lists of verl's
sft_trainer work with --overrides-file.
""",
    "dpo": """\
Train a policy on preferences: `dovetail dpo [FILE.yaml ...] key=value ...`. DPO, or what `dpo.loss_type` names.

  dovetail dpo model=~/models/Qwen2.5-0.5B-Instruct data=pairs.jsonl dpo.beta=0.1

Rows have a prompt, `chosen` and `rejected`; with dpo.loss_type=kto also a prompt, `completion` and `label`: see
docs/preferences.md.
""",
    "reward": """\
Train a reward model on preferences: `dovetail reward [FILE.yaml ...] key=value ...`.

  dovetail reward model=~/models/Qwen2.5-0.5B-Instruct data=pairs.jsonl

Rows have a prompt, `chosen` and `rejected`. Optimizer and batches are set at `critic.*`. What `dovetail export` writes
of it works as `reward_model.model.path`: see docs/preferences.md.
""",
    "distill": """\
Distill a teacher into a student: `dovetail distill [FILE.yaml ...] key=value ...`.

  dovetail distill model=~/models/Qwen3-0.6B data=prompts.jsonl distill.teacher.path=~/models/Qwen3-8B

The student (`model`) samples responses to the prompts (`data`), and learns from how likely the teacher finds each of
its tokens. Both need the same tokenizer. A task reward is mixed in with `distill.reward_coef`. The other keys are those
of `dovetail train`: see docs/distill.md.
""",
}
"""Of the commands that set `trainer.method`, for their `--help`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="*", metavar="FILE|key=value", help="YAML files and overrides")
    parser.add_argument(
        "--overrides-file", action="append", default=[], type=Path, metavar="F", help="file with one override per line"
    )
    parser.add_argument("--local", action="store_true", help="one process, no Ray: a debugger works")
    parser.add_argument("--verbose", action="store_true", help="log more")


def run(args: argparse.Namespace) -> int:
    """`dovetail sft` and its like set `trainer.method`; for `dovetail train` it says what is done."""
    set_logging(args.verbose)
    files, overrides = split_arguments(args.inputs)
    if args.command in DESCRIPTIONS:
        overrides = [*overrides, f"trainer.method={args.command}"]
    loaded = load_config(files, overrides, overrides_files=args.overrides_file)
    loaded = choose_open_keys(loaded, one_process=args.local)

    def say() -> None:  # after the errors of a run that cannot start, which they would hide
        for notice in loaded.notices:
            sys.stderr.write(f"notice: {notice}\n")
        for choice in loaded.choices:
            sys.stderr.write(f"chosen: {choice.message}\n")

    # Heavy imports come after the configuration is known to be right.
    from dovetail.trainer.run import RunResult, exit_code_of, run_training

    def train() -> RunResult:
        return run_training(loaded.config, use_ray=not args.local, on_checked=say)

    return exit_code_of(train, loaded.config)
