"""Train a policy on preferences: `dovetail dpo [FILE.yaml ...] key=value ...`. DPO, or what `dpo.loss_type` names.

  dovetail dpo model=~/models/Qwen2.5-0.5B-Instruct data=pairs.jsonl dpo.beta=0.1

Rows have a prompt, `chosen` and `rejected`; with dpo.loss_type=kto also a prompt, `completion` and `label`: see
docs/preferences.md.
"""

from __future__ import annotations

import argparse

from dovetail.cli import train
from dovetail.cli.train import add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    return train.run(args, "dpo")
