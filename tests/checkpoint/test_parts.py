"""A checkpoint is complete when the part of every rank is there, and its bytes are those that were saved."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path

import pytest

from dovetail.checkpoint import manifest
from dovetail.checkpoint.manifest import MANIFEST_NAME, BrokenCheckpoint, verify_folder, write_part
from dovetail.checkpoint.store import CheckpointStore
from dovetail.cli.main import main

pytestmark = pytest.mark.unit

LARGE = 3 << 20
"""More than one piece of what is hashed at a time."""


def write_ranks(folder: Path, ranks: range) -> None:
    """What the ranks of a worker group leave behind."""
    (folder / "actor" / "shards").mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        (folder / "actor" / "shards" / f"__{rank}_0.distcp").write_bytes(bytes([rank]) * LARGE)
        (folder / "actor" / f"rng_{rank}.safetensors").write_text("random")
    (folder / "actor" / "state.json").write_text("{}")
    for rank in ranks:
        write_part(folder / "actor", rank)


def save(store: CheckpointStore, step: int) -> Path:
    write_ranks(store.begin(step), range(2))
    return store.commit(step, world_size=2, parts={"actor": 2})


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_each_rank_lists_what_it_wrote_and_the_manifest_joins_them(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path), 1)
    parts = [set(json.loads((folder / "actor" / f"part_{rank}.json").read_text())["files"]) for rank in range(2)]
    assert parts[0] == {"shards/__0_0.distcp", "rng_0.safetensors", "state.json"}
    assert parts[1] == {"shards/__1_0.distcp", "rng_1.safetensors"}
    listed = verify_folder(folder).files
    assert set(listed) == {f"actor/{name}" for name in parts[0] | parts[1] | {"part_0.json", "part_1.json"}}
    assert all(record.sha256 for record in listed.values())


def test_without_the_part_of_a_rank_there_is_no_checkpoint(tmp_path: Path) -> None:
    """The third of three ranks wrote on a node with a folder of its own."""
    store = CheckpointStore(tmp_path)
    good = save(store, 1)
    write_ranks(store.begin(2), range(2))
    with pytest.raises(BrokenCheckpoint, match=r"rank 2 of 3 of actor wrote is not there.*all nodes share"):
        store.commit(2, world_size=3, parts={"actor": 3})
    assert store.latest() == good


def test_a_shard_that_a_part_lists_and_that_is_not_there_makes_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    folder = store.begin(1)
    write_ranks(folder, range(2))
    (folder / "actor" / "shards" / "__1_0.distcp").unlink()
    with pytest.raises(BrokenCheckpoint, match=r"file actor/shards/__1_0.distcp is missing"):
        store.commit(1, world_size=2, parts={"actor": 2})


def test_a_flipped_bit_in_a_shard_is_found_and_the_older_checkpoint_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    older, newer = save(store, 1), save(store, 2)
    flip_a_bit(newer / "actor" / "shards" / "__1_0.distcp")
    with caplog.at_level(logging.WARNING):
        assert store.latest() == older
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert "actor/shards/__1_0.distcp has changed since it was saved" in caplog.text


def test_a_file_that_the_disk_does_not_give_back_makes_no_checkpoint_and_is_found_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(CheckpointStore(tmp_path), 1)

    def fails(path: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(manifest, "_sha256", fails)
    with pytest.raises(BrokenCheckpoint, match=r"a file cannot be read .*Input/output error") as broken:
        verify_folder(folder)
    assert broken.value.damaged
    with pytest.raises(OSError, match="Input/output error"):
        write_part(folder / "actor", 0)


def test_the_error_travels_between_processes(tmp_path: Path) -> None:
    error = BrokenCheckpoint(tmp_path, "it is cut", damaged=True)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.damaged) == (str(error), True)


def test_audit_says_which_checkpoint_is_not_what_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    damaged = save(store, 2)
    assert main(["audit", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("ok ") == 2
    flip_a_bit(damaged / "actor" / "shards" / "__0_0.distcp")
    assert main(["audit", str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("ok ")
    assert second.startswith("BROKEN")
    assert "global_step_2" in second
    assert main(["audit", str(store.folder(1))]) == 0
    (damaged / MANIFEST_NAME).unlink()
    assert main(["audit", str(tmp_path)]) == 1
    assert "no manifest.json" in capsys.readouterr().out


def test_audit_of_a_folder_without_checkpoints_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    assert "has no checkpoints" in capsys.readouterr().err
