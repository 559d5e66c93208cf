"""A checkpoint that is damaged, or made by somebody who means harm, ends in one line, never in a run of its code."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint.manifest import MANIFEST_NAME, BrokenCheckpoint, write_manifest
from dovetail.trainer.checkpoints import TrainerCheckpoints
from dovetail.trainer.groups import RoleGroups, create_groups
from tests.checkpoint import payload
from tests.trainer.toy_run import DAPO, Toy, repeatable, train

pytestmark = pytest.mark.e2e

SAVING: dict[str, Any] = {"trainer.save_freq": 1, **DAPO}
SHARD = "actor/shards/__0_0.distcp"


@pytest.fixture(scope="module")
def reference(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Three steps that carry groups over, and the metrics of the run."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    return folder, repeatable(train(toy.config(folder, SAVING))[1])


@pytest.fixture(scope="module")
def groups(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleGroups]:
    built = create_groups(toy.config(tmp_path_factory.mktemp("groups"), SAVING), use_ray=False, use_gpu=False)
    built.actor_rollout.init_model(3)
    yield built
    built.shutdown()


@pytest.fixture
def run(reference: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> Path:
    """A copy of the run as it was when step 3 was not done yet."""
    shutil.copytree(reference[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "global_step_3")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2\n")
    return tmp_path / "run"


def load(toy: Toy, groups: RoleGroups, folder: Path, **changes: Any) -> Any:
    keys = {f"trainer.{name}": value for name, value in changes.items()}
    return TrainerCheckpoints(toy.config(folder, {**SAVING, **keys})).load(groups)


HOSTILE: dict[str, Callable[[Path, Path], None]] = {
    **{
        name: (lambda folder, marker, name=name: payload.pickled(folder / name, marker))
        for name in (
            "trainer.json", "surplus.safetensors", "actor/state.json", "actor/extra.safetensors",
            "actor/rng_0.safetensors", "actor/shards/.metadata", SHARD,
        )
    },
    **{
        f"{name} from torch.save": (lambda folder, marker, name=name: payload.torch_saved(folder / name, marker))
        for name in ("surplus.safetensors", "actor/extra.safetensors", "actor/rng_0.safetensors", SHARD)
    },
    "in the description of the tensors": lambda folder, marker: payload.in_metadata(folder / "actor/shards", marker),
    "as a tensor": lambda folder, marker: payload.in_tensor(folder / "actor/shards", marker),
    "as a tensor that is called a value": (
        lambda folder, marker: payload.in_tensor_called_a_value(folder / "actor/shards", marker)
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_checkpoint_runs_nothing_and_is_refused_in_one_line(
    toy: Toy, groups: RoleGroups, run: Path, tmp_path: Path, how: str
) -> None:
    """Its checksums are right: whoever can write the payload can write the manifest."""
    folder, marker = run / "global_step_2", tmp_path / "marker"
    HOSTILE[how](folder, marker)
    write_manifest(folder, step=2, world_size=1)
    with pytest.raises(BrokenCheckpoint) as caught:
        load(toy, groups, run, resume_mode="resume_path", resume_from_path=str(folder))
    assert not marker.exists()
    assert len(str(caught.value).splitlines()) == 1
    # On its own the run takes the older one, which is as it was saved.
    assert load(toy, groups, run).folder == run / "global_step_1"
    assert not marker.exists()


@pytest.mark.parametrize("name", ["actor/part_0.json", MANIFEST_NAME])
def test_payloads_in_lists_of_files_run_nothing(
    toy: Toy, groups: RoleGroups, run: Path, tmp_path: Path, name: str
) -> None:
    payload.pickled(run / "global_step_2" / name, tmp_path / "marker")
    assert load(toy, groups, run).folder == run / "global_step_1"
    assert not (tmp_path / "marker").exists()


def test_a_checkpoint_of_an_earlier_version_is_refused_with_the_way_out(
    toy: Toy, groups: RoleGroups, run: Path
) -> None:
    folder = run / "global_step_2"
    state = folder / "actor" / "state.json"
    state.write_text(state.read_text().replace('"version": 2', '"version": 1'))
    write_manifest(folder, step=2, world_size=1)
    with pytest.raises(BrokenCheckpoint, match=r"earlier version.*pickled.*load_contents=\[model,optimizer\]"):
        load(toy, groups, run)


def cut(folder: Path) -> None:
    shard = folder / SHARD
    shard.write_bytes(shard.read_bytes()[:-1000])


def flip(folder: Path) -> None:
    content = bytearray((folder / SHARD).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / SHARD).write_bytes(content)


def break_zip(folder: Path) -> None:
    content = bytearray((folder / SHARD).read_bytes())
    content[:100] = bytes(100)
    (folder / SHARD).write_bytes(content)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "flip": flip,
    "zip": break_zip,
    "manifest": lambda folder: (folder / MANIFEST_NAME).unlink(),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_an_explicit_resume_path_that_is_damaged_is_an_error_in_one_line(
    toy: Toy, groups: RoleGroups, run: Path, how: str
) -> None:
    folder = run / "global_step_2"
    DAMAGE[how](folder)
    with pytest.raises(BrokenCheckpoint, match="global_step_2 cannot be used") as caught:
        load(toy, groups, run, resume_mode="resume_path", resume_from_path=str(folder))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("how", ["flip", "manifest"])
def test_a_run_with_a_damaged_checkpoint_continues_the_one_before_and_ends_the_same(
    toy: Toy,
    run: Path,
    reference: tuple[Path, list[dict[str, Any]]],
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    DAMAGE[how](run / "global_step_2")
    with caplog.at_level(logging.WARNING):
        _, rows = train(toy.config(run, SAVING))
    said = [record.message for record in caplog.records if "global_step_2" in record.message]
    assert len(said) == 1
    assert "trying an older one" in said[0]
    assert "\n" not in said[0]
    assert repeatable(rows) == reference[1]


def test_when_no_checkpoint_can_be_read_the_run_does_not_start_anew(toy: Toy, run: Path) -> None:
    for step in (1, 2):
        flip(run / f"global_step_{step}")
    with pytest.raises(BrokenCheckpoint, match="global_step_2 cannot be used"):
        train(toy.config(run, SAVING))
