"""Train a reward model on preferences: `dovetail reward [FILE.yaml ...] key=value ...`.

  dovetail reward model=~/models/Qwen2.5-0.5B-Instruct data=pairs.jsonl

Rows have a prompt, `chosen` and `rejected`. Optimizer and batches are set at `critic.*`. What `dovetail export` writes
of it works as `reward_model.model.path`: see docs/preferences.md.
"""

from __future__ import annotations

import argparse

from dovetail.cli import train
from dovetail.cli.train import add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    return train.run(args, "reward")
