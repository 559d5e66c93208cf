"""Fine-tune on conversations: `dovetail sft [FILE.yaml ...] key=value ...`. The loss is on the assistant's tokens only.

  dovetail sft model=~/models/Qwen2.5-0.5B data=chats.jsonl

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
