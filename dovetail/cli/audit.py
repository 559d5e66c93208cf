"""Check a finished or stopped run: `dovetail audit RUN`.

Compares every checkpoint with the checksums in its manifest. Checks in `draws.jsonl` that every draw (a prompt with its
group of responses) ended at most once, that none was skipped, that none was trained on with older weights than
`async_training` allows, and that each checkpoint holds as many draws as there were at its step.

Exit code 0: all is well. 1: a sentence for each violation. 2: there is nothing to audit. Nothing is changed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from dovetail.observability.ledger import Ledger, read_ledger, violations
from dovetail.observability.run_folder import CONFIG

_MOST_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="a run folder, or one global_step_N folder")


def run(args: argparse.Namespace) -> int:
    from dovetail.checkpoint.manifest import MANIFEST_NAME
    from dovetail.checkpoint.store import CheckpointStore

    given: Path = args.run_folder
    store = CheckpointStore(given)
    folders = [given] if (given / MANIFEST_NAME).exists() else [store.folder(step) for step in store.steps()]
    ledger = read_ledger(given)
    if not folders and ledger is None:
        what = "has no checkpoints and no draws.jsonl" if given.exists() else "does not exist"
        sys.stderr.write(f"{given} {what}; give a run folder or a global_step_N folder.\n")
        return 2
    num_broken = sum(not _checkpoint_is_complete(folder) for folder in folders)
    sentences = [] if ledger is None else _audit_draws(given, ledger, folders)
    for sentence in sentences[:_MOST_SHOWN]:
        sys.stdout.write(f"BROKEN  {sentence}\n")
    if len(sentences) > _MOST_SHOWN:
        sys.stdout.write(f"BROKEN  {len(sentences) - _MOST_SHOWN} more violations.\n")
    return 1 if num_broken or sentences else 0


def _checkpoint_is_complete(folder: Path) -> bool:
    from dovetail.checkpoint.manifest import BrokenCheckpoint, verify_folder

    try:
        files = verify_folder(folder).files.values()
    except BrokenCheckpoint as problem:
        sys.stdout.write(f"BROKEN  {problem}\n")
        return False
    unhashed = sum(not record.sha256 for record in files)
    note = f"; {unhashed} of them without a checksum, from an earlier version" if unhashed else ""
    size = sum(record.size for record in files) / 2**20
    sys.stdout.write(f"ok      {folder}: {len(files)} files, {size:.1f} MiB{note}\n")
    return True


def _audit_draws(folder: Path, ledger: Ledger, checkpoints: Sequence[Path]) -> list[str]:
    """Print what became of the draws; returns a sentence for each violation."""
    from dovetail.config.load import load_config

    file = folder / CONFIG
    if not file.exists():
        return [f"{file} is missing, so the bound of this run is not known."]
    config = load_config([file]).config  # an earlier version may have written it
    masks = config.async_training.on_stale_in_force == "mask"
    bound = config.group_staleness_bound
    sentences = list(violations(ledger, bound=bound, masks_stale=masks))
    sentences += _wrong_checkpoints(ledger, checkpoints)
    bounds = [record.bound for record in ledger.draws.values() if record.bound is not None]
    ages = (record.staleness(bound if masks else None) for record in ledger.draws.values())
    histogram = Counter(age for age in ages if age is not None)
    total = max(1, histogram.total())
    rows = {"draws": len(ledger.draws), **dict(sorted(ledger.counts().items()))}
    rows |= {f"trained at staleness {age}": histogram[age] for age in sorted(histogram)}
    for name, count in rows.items():
        share = f"  {count / total:6.1%}" if name.startswith("trained at") else ""
        sys.stdout.write(f"        {name:<28}{count:>10}{share}\n")
    if not sentences:
        sys.stdout.write(
            f"ok      {folder}: every draw ended at most once, none was skipped, none was trained at a "
            f"staleness above {max([bound, *bounds])}\n"
        )
    return sentences


def _wrong_checkpoints(ledger: Ledger, checkpoints: Sequence[Path]) -> Iterator[str]:
    for checkpoint in checkpoints:
        try:
            state = json.loads((checkpoint / "trainer.json").read_text())
        except (OSError, ValueError):
            continue  # the manifest's own comparison names a file that is gone or changed
        step, num_drawn = state["step"], state.get("num_drawn")
        recorded = ledger.num_drawn_at.get(step)
        if recorded is not None and recorded != num_drawn:
            yield f"{checkpoint.name} holds {num_drawn} draws, and the ledger has {recorded} at the end of step {step}."
