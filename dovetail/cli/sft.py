"""Fine-tune on conversations: `dovetail sft [FILE.yaml ...] key=value ...`. The loss is on the assistant's tokens only.

  dovetail sft actor_rollout_ref.model.path=~/models/Qwen2.5-0.5B data.train_files=chats.jsonl data.train_batch_size=64

Rows have `messages` (with `tools`), or a prompt and a response: see docs/sft.md. Launch lists of verl's
fsdp_sft_trainer work with --overrides-file.
"""

from __future__ import annotations

import argparse

from dovetail.cli import train
from dovetail.cli.train import add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    return train.run(args, "sft")
