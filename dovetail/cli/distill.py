"""Distill a teacher into a student: `dovetail distill [FILE.yaml ...] key=value ...`.

The student (`actor_rollout_ref.model.path`) samples responses to the prompts of `data.train_files`, and learns from how
likely the teacher (`distill.teacher.path`) finds each of its tokens. Both need one tokenizer. A task reward is mixed in
with `distill.reward_coef`. Every other key is that of `dovetail train`.
"""

from __future__ import annotations

import argparse

from dovetail.cli import train
from dovetail.cli.train import add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    return train.run(args, "distill")
