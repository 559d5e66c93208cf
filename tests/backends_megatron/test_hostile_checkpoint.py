"""A Megatron checkpoint made by somebody who means harm runs nothing and is refused in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.backends_megatron.family_models import megatron_backend, save_folder
from tests.backends_megatron.test_checkpoint_layouts import OPTIM, _step
from tests.checkpoint import payload
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

HOSTILE: dict[str, Callable[[Path, Path], None]] = {
    "metadata": lambda folder, marker: payload.pickled(folder / "mcore" / ".metadata", marker),
    "inside the metadata": lambda folder, marker: payload.in_metadata(folder / "mcore", marker),
    "common": lambda folder, marker: payload.torch_saved(folder / "mcore" / "common.pt", marker),
    "common, pickled": lambda folder, marker: payload.pickled(folder / "mcore" / "common.pt", marker),
    "metadata.json": lambda folder, marker: payload.pickled(folder / "mcore" / "metadata.json", marker),
    "tensor": lambda folder, marker: payload.in_tensor(folder / "mcore", marker),
    "tensor called a value": lambda folder, marker: payload.in_tensor_called_a_value(folder / "mcore", marker),
    "extra": lambda folder, marker: payload.torch_saved(folder / "extra.safetensors", marker),
    "random state": lambda folder, marker: payload.pickled(folder / "rng_0.safetensors", marker),
    "state.json": lambda folder, marker: payload.pickled(folder / "state.json", marker),
}
AS_START_WEIGHTS = ("metadata", "inside the metadata", "common", "tensor", "tensor called a value")


def _load_each(rank: int, world_size: int, root: Path) -> dict[str, tuple[str, bool]]:
    from dovetail.checkpoint.manifest import BrokenCheckpoint

    backend = megatron_backend(root / "model", optim=OPTIM)
    _step(backend, 0)
    backend.save_state(root / "good")
    backend.load_state(root / "good")
    results: dict[str, tuple[str, bool]] = {}
    for number, (case, damage) in enumerate(HOSTILE.items()):
        folder, marker = root / f"hostile-{number}", root / f"marker-{number}"
        shutil.copytree(root / "good", folder)
        damage(folder, marker)
        with pytest.raises(BrokenCheckpoint) as caught:
            backend.load_state(folder)
        results[case] = str(caught.value), marker.exists()
    # Last: each new backend takes the place of the one before in Megatron's global state.
    for case in AS_START_WEIGHTS:
        number = list(HOSTILE).index(case)
        more = {"use_dist_checkpointing": True, "dist_checkpointing_path": str(root / f"hostile-{number}")}
        with pytest.raises(BrokenCheckpoint) as caught:
            megatron_backend(root / "model", more=more)
        results[f"{case}, as start weights"] = str(caught.value), (root / f"marker-{number}").exists()
    return results


def test_no_file_of_a_checkpoint_runs_code(tmp_path: Path) -> None:
    save_folder("qwen2", tmp_path / "model")
    [results] = run_ranks(_load_each, 1, tmp_path)
    assert len(results) == len(HOSTILE) + len(AS_START_WEIGHTS)
    for case, (message, has_run) in results.items():
        assert not has_run, case
        assert len(message.splitlines()) == 1, (case, message)
        assert "cannot be used" in message
