"""A run's checkpoints are whole or absent, and the last good one is always found."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint.manifest import MANIFEST_NAME, BrokenCheckpoint, read_manifest, verify_folder
from dovetail.checkpoint.score import Score
from dovetail.checkpoint.store import LATEST_NAME, CheckpointStore

pytestmark = pytest.mark.unit


def save(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    folder = store.begin(step)
    (folder / "actor").mkdir()
    (folder / "actor" / "shard_0").write_text(text)
    store.commit(step, world_size=2, extra={"seed": 7})
    store.prune()
    return store.folder(step)


def test_a_saved_step_is_whole_and_latest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    folder = save(store, 3)
    manifest = verify_folder(folder)
    assert (manifest.step, manifest.world_size, manifest.extra) == (3, 2, {"seed": 7})
    assert list(manifest.files) == ["actor/shard_0"]
    assert store.latest() == folder
    assert (tmp_path / LATEST_NAME).read_text() == "3\n"


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "absent").latest() is None


def test_a_save_that_is_given_up_leaves_the_last_good_one_and_no_remains(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    good = save(store, 1)
    (store.begin(2) / "half").write_text("half of the wei")
    store.discard(2)
    assert store.latest() == good
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", LATEST_NAME]


def test_a_kill_before_the_manifest_is_not_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    good = save(store, 1)
    (store.begin(2) / "shard").write_text("half")
    assert store.latest() == good
    assert store.steps() == [1]
    save(store, 3)  # also clears what the kill left
    assert not list(tmp_path.glob(".global_step_*"))


def test_a_kill_before_the_latest_file_still_resumes_from_a_whole_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    (tmp_path / LATEST_NAME).unlink()
    assert store.latest() == store.folder(2)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / MANIFEST_NAME).unlink(), "no manifest.json"),
        (lambda folder: (folder / MANIFEST_NAME).write_text("{"), "manifest.json is not readable"),
        (lambda folder: (folder / "actor" / "shard_0").unlink(), "file actor/shard_0 is missing"),
        (lambda folder: (folder / "actor" / "shard_0").write_text("weigh"), "5 bytes instead of 7"),
        (lambda folder: (folder / "actor" / "shard_0").write_text("wEights"), "checksum differs"),
    ],
)
def test_damage_is_named_and_the_older_checkpoint_is_taken(tmp_path: Path, damage, reason, caplog) -> None:
    store = CheckpointStore(tmp_path)
    older, newer = save(store, 1), save(store, 2)
    damage(newer)
    with pytest.raises(BrokenCheckpoint, match=reason):
        verify_folder(newer)
    assert store.latest() == older
    assert reason in caplog.text


def test_only_broken_checkpoints_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (save(store, 1) / MANIFEST_NAME).unlink()
    with pytest.raises(BrokenCheckpoint, match=r"global_step_1 cannot be used"):
        store.latest()


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path), 1)
    raw = json.loads((folder / MANIFEST_NAME).read_text())
    (folder / MANIFEST_NAME).write_text(json.dumps({**raw, "format_version": 99}))
    with pytest.raises(BrokenCheckpoint, match="format version 99"):
        read_manifest(folder)


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=2)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert store.steps() == [3, 4]


def test_retention_never_deletes_the_only_whole_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=1)
    save(store, 1)
    broken = tmp_path / "global_step_2"
    broken.mkdir()
    assert store.prune() == []
    assert store.latest() == store.folder(1)


@pytest.mark.parametrize("repeated", [False, True], ids=["pruned", "replaced"])
def test_a_file_that_cannot_be_deleted_yet_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: bool
) -> None:
    """NFS keeps a file that somebody reads as `.nfs...`, and refuses to delete it."""
    store = CheckpointStore(tmp_path, max_to_keep=1)
    (save(store, 1) / ".nfs0001").touch()
    unlink = os.unlink

    def refuse(path: Any, **where: Any) -> None:
        if os.path.basename(path).startswith(".nfs"):
            raise OSError(errno.EBUSY, "Device or resource busy")
        unlink(path, **where)

    with monkeypatch.context() as nfs:
        nfs.setattr(os, "unlink", refuse)
        save(store, 1 if repeated else 2)
        assert save(store, 3) == store.latest()
    assert store.steps() == [3]
    save(store, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_4", LATEST_NAME]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, "first")
    folder = save(store, 1, "second")
    assert (folder / "actor" / "shard_0").read_text() == "second"
    assert store.latest() == folder
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", LATEST_NAME]


def test_a_kill_between_the_two_renames_of_a_replacement_brings_the_old_one_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    folder = save(store, 1, "first")
    folder.rename(tmp_path / ".global_step_1.replaced")
    assert store.latest() == folder
    assert (folder / "actor" / "shard_0").read_text() == "first"


def test_retention_keeps_the_best_score_and_what_the_newest_score_measures_counts(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=1)

    def scored(step: int, value: float, metric: str = "acc", mode: Any = "max") -> list[int]:
        store.begin(step)
        store.commit(step, world_size=1, extra=Score(metric, value, mode).as_extra())
        store.prune()
        return store.steps()

    assert store.best() is None
    assert [scored(1, 0.5), scored(2, 0.7), scored(3, 0.7), scored(4, 0.1)] == [[1], [2], [2, 3], [2, 4]]
    assert store.best() == store.folder(2), "the first of equal ones"
    save(store, 5)
    assert store.steps() == [2, 5], "a checkpoint without a score is the newest, and no better"
    assert scored(6, 3.0, "loss", "min") == [6]
    assert scored(7, 2.0, "loss", "min") == [7]
    assert scored(8, 2.5, "loss", "min") == [7, 8]
