"""A reader of the folder finds a whole version or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.weight_sync import DiskWeights, weight_checksum
from tests.models.tiny import tiny_config, tiny_model

pytestmark = pytest.mark.unit


def test_what_was_written_is_read_with_its_version(tmp_path: Path) -> None:
    weights = [("a", torch.randn(3, 4)), ("b", torch.randn(2).bfloat16()), ("c", torch.randn(50))]
    disk = DiskWeights(tmp_path / "weights", bucket_bytes=64)
    assert disk.latest() is None
    disk.write(weights, 7)
    found = DiskWeights(tmp_path / "weights").latest()
    assert found is not None
    assert found.version == 7
    assert len(list(found.folder.glob("*.safetensors"))) > 1
    assert weight_checksum(found.named_weights()) == weight_checksum(weights)


def test_a_source_that_fails_leaves_the_older_version_in_place(tmp_path: Path) -> None:
    disk = DiskWeights(tmp_path)
    disk.write([("a", torch.ones(2))], 1)

    def broken() -> object:
        yield "a", torch.zeros(2)
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        disk.write(broken(), 2)
    found = disk.latest()
    assert found is not None
    assert found.version == 1
    assert dict(found.named_weights())["a"].tolist() == [1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["VERSION", "v00000001"]


def test_only_the_newest_versions_stay(tmp_path: Path) -> None:
    disk = DiskWeights(tmp_path, keep=2)
    for version in (1, 2, 3, 3):
        disk.write([("a", torch.full((2,), float(version)))], version)
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v00000002", "v00000003"]


def test_transformers_reads_a_version(tmp_path: Path) -> None:
    model = tiny_model("llama_tied")
    found = DiskWeights(tmp_path, bucket_bytes=1 << 16).write(model.named_parameters(), 1)
    (found.folder / "config.json").write_text(json.dumps(tiny_config("llama_tied").to_dict()))
    loaded = AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.float32)
    assert weight_checksum(loaded.named_parameters()) == weight_checksum(model.named_parameters())
