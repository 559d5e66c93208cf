"""The checkpoints of one run: ``global_step_N`` folders, the newest one's number, and which to delete. No tensors.

A save goes into a hidden folder beside the others; ``commit`` writes its manifest, renames it, then updates
``latest_checkpointed_iteration.txt``. Whatever kills the process in between, the last good checkpoint stays and stays
findable. One process (the driver) owns the store; workers only write into the folder they are given.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.checkpoint.manifest import BrokenCheckpoint, Manifest, verify_folder, write_manifest
from dovetail.checkpoint.score import Score, best_step
from dovetail.observability.disk import flush_to_disk, write_text_atomically

logger = logging.getLogger(__name__)

LATEST_NAME = "latest_checkpointed_iteration.txt"
_FOLDER_NAME = re.compile(r"global_step_(\d+)$")


class CheckpointStore:
    """Checkpoints under one folder. ``max_to_keep`` of None or below 1 keeps all."""

    def __init__(self, root: Path | str, *, max_to_keep: int | None = None) -> None:
        self.root = Path(root)
        self._max_to_keep = max_to_keep

    def begin(self, step: int) -> Path:
        """Make the hidden folder of ``step``, removing what interrupted saves left behind."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._finish_replacing()
        for leftover in self.root.glob(".global_step_*.partial"):
            logger.warning("removing %s, left by an interrupted save", leftover)
            shutil.rmtree(leftover, ignore_errors=True)
        folder = self._partial(step)
        folder.mkdir()
        return folder

    def commit(
        self,
        step: int,
        *,
        world_size: int,
        parts: Mapping[str, int] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Turn the hidden folder into ``global_step_N`` and make it the latest. ``parts``: see ``write_manifest``."""
        partial, final = self._partial(step), self.folder(step)
        write_manifest(partial, step=step, world_size=world_size, parts=parts, extra=extra)
        if final.exists():
            # The same step saved twice (a rerun after a resume). The old one leaves under a hidden name first: at every
            # moment one of the two is complete, and `_finish_replacing` brings it back if we die between the renames.
            replaced = self.root / f".global_step_{step}.replaced"
            os.rename(final, replaced)
            os.rename(partial, final)
            self._delete(replaced, step)
        else:
            os.rename(partial, final)
        flush_to_disk(self.root)
        write_text_atomically(self.root / LATEST_NAME, f"{step}\n")
        return final

    def discard(self, step: int) -> None:
        """Take an unfinished save away. Also frees its space: on a full disk it would keep the next from fitting."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def bytes_needed(self, step: int) -> int:
        """Size of a checkpoint: that of the newest complete one, or what the unfinished save of ``step`` has so far."""
        written = sum(path.stat().st_size for path in self._partial(step).rglob("*") if path.is_file())
        complete = list(self._complete_manifests().values())
        return max(written, sum(record.size for record in complete[-1].files.values())) if complete else written

    def folder(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is or would be."""
        return self.root / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Steps that have a folder, ascending; complete or not."""
        if not self.root.is_dir():
            return []
        matches = (_FOLDER_NAME.match(path.name) for path in self.root.iterdir() if path.is_dir())
        return sorted(int(match.group(1)) for match in matches if match)

    def paths(self, after: int = -1) -> list[Path]:
        """The folders of the steps after `after`, and the file that names the newest where it is one of them.

        Newest first: where moving them away is interrupted, the ones that stay are in sequence.
        """
        self._finish_replacing()
        recorded, latest = self._recorded_step(), self.root / LATEST_NAME
        names_one = latest.exists() and (recorded is None or recorded > after)
        return [*([latest] if names_one else []), *(self.folder(step) for step in self.steps()[::-1] if step > after)]

    def latest(self, *, checksums: bool = True) -> Path | None:
        """The checkpoint to resume from: the first of `complete`, or None when there is none at all."""
        return next(self.complete(checksums=checksums), None)

    def complete(self, *, checksums: bool = True) -> Iterator[Path]:
        """Complete checkpoints, the recorded one first, then from the newest on. Each is verified when it is asked for.

        Broken ones are named in a warning. If there are folders but none is complete, that is an error: starting from
        scratch in silence would throw a run away.
        """
        self._finish_replacing()
        recorded = self._recorded_step()
        candidates = sorted(self.steps(), reverse=True)
        if recorded is not None:
            candidates = [recorded, *(step for step in candidates if step != recorded)]
        first_problem: BrokenCheckpoint | None = None
        is_any_complete = False
        for step in candidates:
            try:
                verify_folder(self.folder(step), checksums=checksums)
            except BrokenCheckpoint as problem:
                logger.warning("%s; trying an older one", problem)
                first_problem = first_problem or problem
            else:
                is_any_complete = True
                yield self.folder(step)
        if first_problem is not None and not is_any_complete:
            raise first_problem

    def scores(self) -> dict[int, Score]:
        """Of every complete checkpoint that has one, by step. Checksums are not compared."""
        found = {step: Score.of_extra(manifest.extra) for step, manifest in self._complete_manifests().items()}
        return {step: score for step, score in found.items() if score is not None}

    def best(self) -> Path | None:
        """The complete checkpoint with the best score; None where none has one."""
        step = best_step(self.scores())
        return None if step is None else self.folder(step)

    def prune(self) -> list[int]:
        """Delete the oldest checkpoints above the limit, the best one excepted; return their steps. Only complete ones
        count as kept."""
        if self._max_to_keep is None or self._max_to_keep < 1:
            return []
        complete = list(self._complete_manifests())
        kept = {self._recorded_step(), best_step(self.scores())}
        surplus = [step for step in complete[: -self._max_to_keep] if step not in kept]
        for step in surplus:
            self._delete(self.folder(step), step)
        return surplus

    def _delete(self, folder: Path, step: int) -> None:
        # Hidden first, so that a kill during the deletion does not leave a broken folder under a good name.
        hidden = tempfile.mkdtemp(prefix=f".global_step_{step}.", suffix=".partial", dir=self.root)
        os.rename(folder, hidden)
        # On NFS a file that somebody has open cannot be deleted; `begin` tries again.
        shutil.rmtree(hidden, ignore_errors=True)

    def _finish_replacing(self) -> None:
        for replaced in self.root.glob(".global_step_*.replaced"):
            final = self.root / replaced.name[1:].removesuffix(".replaced")
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                os.rename(replaced, final)

    def _complete_manifests(self) -> dict[int, Manifest]:
        """By step, ascending; checksums are not compared."""
        manifests = {}
        for step in self.steps():
            with suppress(BrokenCheckpoint):
                manifests[step] = verify_folder(self.folder(step), checksums=False)
        return manifests

    def _partial(self, step: int) -> Path:
        return self.root / f".global_step_{step}.partial"

    def _recorded_step(self) -> int | None:
        path = self.root / LATEST_NAME
        if not path.is_file():
            return None
        text = path.read_text().strip()
        if not text.isdigit():
            logger.warning("%s holds %r instead of a step number; looking at the folders", path, text)
            return None
        return int(text)
