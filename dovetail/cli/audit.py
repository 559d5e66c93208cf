"""Audit: `dovetail audit RUN`. Compares every checkpoint of a run folder with the checksums in its manifest.

Exits with 0 when all are what was saved, with 1 when one is not, with 2 when there is none. Changes nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="a run folder, or one global_step_N folder")


def run(args: argparse.Namespace) -> int:
    from dovetail.checkpoint.manifest import MANIFEST_NAME, BrokenCheckpoint, verify_folder
    from dovetail.checkpoint.store import CheckpointStore

    given: Path = args.run_folder
    store = CheckpointStore(given)
    folders = [given] if (given / MANIFEST_NAME).exists() else [store.folder(step) for step in store.steps()]
    if not folders:
        sys.stderr.write(f"{given} has no checkpoints; give a run folder or a global_step_N folder.\n")
        return 2
    num_broken = 0
    for folder in folders:
        try:
            files = verify_folder(folder).files.values()
        except BrokenCheckpoint as problem:
            num_broken += 1
            sys.stdout.write(f"BROKEN  {problem}\n")
            continue
        unhashed = sum(not record.sha256 for record in files)
        note = f"; {unhashed} of them without a checksum, from an earlier version" if unhashed else ""
        size = sum(record.size for record in files) / 2**20
        sys.stdout.write(f"ok      {folder}: {len(files)} files, {size:.1f} MiB{note}\n")
    return 1 if num_broken else 0
