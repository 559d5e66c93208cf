"""Replay: `dovetail replay RUN`. Trains again on the batches that an asynchronous run with `async_training.record=True`
recorded, and compares metrics and checkpoints with the run's own. Needs the run's model, data and reward files, no
engine; what it trains is in RUN/replay.

Exits with 0 when everything is equal, with 1 and a sentence for each difference when not, with 2 when the record is
missing, incomplete or wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dovetail.cli.option_types import output_folder

_MOST_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of a recorded run")
    parser.add_argument("--out", type=output_folder, metavar="FOLDER", help="where to train; RUN/replay without it")
    parser.add_argument("--local", action="store_true", help="one process, no Ray")


def run(args: argparse.Namespace) -> int:
    from dovetail.trainer.recording import RecordError
    from dovetail.trainer.replay import replay_run

    folder: Path = args.run_folder.absolute()
    try:
        replay = replay_run(folder, args.out or folder / "replay", use_ray=not args.local)
    except RecordError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for sentence in replay.differences[:_MOST_SHOWN]:
        sys.stdout.write(f"DIFFERS {sentence}\n")
    if len(replay.differences) > _MOST_SHOWN:
        sys.stdout.write(f"DIFFERS {len(replay.differences) - _MOST_SHOWN} more.\n")
    if replay.differences:
        return 1
    saved = f"the weights of {', '.join(replay.checkpoints)}" if replay.checkpoints else "no checkpoint to compare"
    sys.stdout.write(f"{replay.num_steps} steps replayed: {replay.num_metrics} metrics are equal, and {saved}\n")
    return 0
