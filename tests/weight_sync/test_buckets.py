"""Buckets and versions in a folder arrive whole or not at all; what does not fit or differs is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dovetail.weight_sync import (
    ExpectedWeights,
    WeightAccount,
    WeightMismatchError,
    iter_buckets,
    require_equal,
    tensor_checksum,
    write_version,
)
from dovetail.weight_sync.buckets import Bucket, entries_of
from tests.checksums import weight_checksum
from tests.models.tiny import tiny_config, tiny_model

pytestmark = pytest.mark.unit


def _weights() -> list[tuple[str, torch.Tensor]]:
    return [
        ("a", torch.randn(7, 5)),
        ("b", torch.randn(33).to(torch.bfloat16)),
        ("scalar", torch.tensor(3.0)),
        ("large", torch.randn(100, 10)),
        ("c", torch.arange(9)),
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
def test_every_tensor_arrives_once_with_its_value_dtype_and_shape(bucket_bytes: int) -> None:
    weights = _weights()
    seen = [(n, t.clone()) for bucket in iter_buckets(weights, bucket_bytes) for n, t in bucket.tensors()]
    assert [name for name, _ in seen] == [name for name, _ in weights]
    for (_, sent), (_, got) in zip(weights, seen, strict=True):
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)


def test_a_bucket_is_no_larger_than_asked_unless_one_tensor_is() -> None:
    buckets = [(len(bucket.entries), bucket.num_bytes) for bucket in iter_buckets(_weights(), 300)]
    assert all(size <= 300 or count == 1 for count, size in buckets)
    assert len(buckets) > 1


def test_a_source_may_reuse_its_tensor_for_the_next_one() -> None:
    def source() -> object:
        tensor = torch.empty(4)
        for value in range(6):
            yield str(value), tensor.fill_(value)

    (bucket,) = iter_buckets(source(), 1 << 20)
    assert [tensor[0].item() for _, tensor in bucket.tensors()] == [0, 1, 2, 3, 4, 5]


def test_a_header_describes_its_bucket() -> None:
    (bucket,) = iter_buckets(_weights(), 1 << 20)
    again = Bucket(entries_of(bucket.header()), bucket.buffer)
    assert again.entries == bucket.entries
    assert again.num_bytes == bucket.num_bytes


def test_the_runs_of_a_bucket_hold_its_tensors_back_to_back() -> None:
    (bucket,) = iter_buckets(_weights(), 1 << 20)
    runs = [([entry.name for entry in run], flat) for run, flat in bucket.runs()]
    # Of 140, 66, 4, 4000 and 72 bytes: none ends where the next may begin.
    assert [names for names, _ in runs] == [["a"], ["b"], ["scalar"], ["large"], ["c"]]
    assert [flat.numel() for _, flat in runs] == [140, 66, 4, 4000, 72]
    even = [("a", torch.arange(32.0)), ("b", torch.arange(16.0)), ("c", torch.arange(5.0)), ("d", torch.arange(3.0))]
    (bucket,) = iter_buckets(even, 1 << 20)
    (names, flat), (last, _) = [([entry.name for entry in run], flat) for run, flat in bucket.runs()]
    assert (names, last) == (["a", "b", "c"], ["d"])
    assert torch.equal(flat.view(torch.float32), torch.cat([tensor for _, tensor in even[:3]]))


def test_a_bucket_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes=0"):
        list(iter_buckets(_weights(), 0))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    weights = [("a", torch.randn(3, 4)), ("b", torch.randn(2).bfloat16()), ("c", torch.randn(50))]
    folder = write_version(tmp_path / "weights", weights, 7, bucket_bytes=64)
    assert folder.name == "v00000007"
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert weight_checksum(written.items()) == weight_checksum(weights)


def test_engines_of_another_user_can_read_every_file_of_a_version(tmp_path: Path) -> None:
    folder = write_version(tmp_path, [("a", torch.ones(2))], 1)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in (folder, *folder.iterdir())} == {
        "v00000001": "0o755",
        "model-00000.safetensors": "0o644",
        "model.safetensors.index.json": "0o644",
    }


def test_a_source_that_fails_leaves_the_older_version_in_place(tmp_path: Path) -> None:
    folder = write_version(tmp_path, [("a", torch.ones(2))], 1)

    def broken() -> object:
        yield "a", torch.zeros(2)
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        write_version(tmp_path, broken(), 2)
    assert list(tmp_path.iterdir()) == [folder]
    assert load_file(folder / "model-00000.safetensors")["a"].tolist() == [1, 1]


def test_only_the_newest_versions_stay(tmp_path: Path) -> None:
    for version in (1, 2, 3, 3):
        write_version(tmp_path, [("a", torch.full((2,), float(version)))], version)
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v00000002", "v00000003"]


def test_transformers_reads_a_version(tmp_path: Path) -> None:
    model = tiny_model("llama_tied")
    folder = write_version(tmp_path, model.named_parameters(), 1, bucket_bytes=1 << 16)
    (folder / "config.json").write_text(json.dumps(tiny_config("llama_tied").to_dict()))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert weight_checksum(loaded.named_parameters()) == weight_checksum(model.named_parameters())


EXPECTED = ExpectedWeights({"embed": (4, 2), "norm": (2,), "head": (4, 2)}, ties={"head": "embed"})


def test_an_unknown_and_a_misshapen_tensor_are_named() -> None:
    account = WeightAccount(EXPECTED)
    assert "'other'" in str(account.problem_with("other", (1,)))
    problem = account.problem_with("norm", (3,))
    assert "'norm'" in str(problem)
    assert "(3,)" in str(problem)
    assert "(2,)" in str(problem)


def test_what_never_arrived_is_named_and_a_tied_name_stands_for_both() -> None:
    account = WeightAccount(EXPECTED)
    assert account.problem_with("head", (4, 2)) is None
    assert account.missing() == "no tensor was given for norm."
    account.problem_with("norm", (2,))
    assert account.missing() is None


def test_a_checksum_sees_one_changed_value_and_nothing_else() -> None:
    tensor = torch.randn(5, 3)
    changed = tensor.clone()
    changed[4, 2] = torch.nextafter(changed[4, 2], torch.tensor(9.0))
    assert tensor_checksum(tensor) == tensor_checksum(tensor.t().contiguous().t())
    assert tensor_checksum(tensor) != tensor_checksum(changed)
    assert tensor_checksum(tensor) != tensor_checksum(tensor.bfloat16())
    assert tensor_checksum(tensor, torch.bfloat16) == tensor_checksum(tensor.bfloat16())


def test_a_checksum_sees_values_that_changed_places_also_across_blocks() -> None:
    tensor = torch.randn(70_000, 2)
    for one, other in ((0, 1), (5, 69_000), (100, 32_868)):  # the last two are a block apart
        swapped = tensor.clone()
        swapped[[one, other]] = tensor[[other, one]]
        assert tensor_checksum(tensor) != tensor_checksum(swapped)
    assert tensor_checksum(tensor) == tensor_checksum(tensor.clone())
    assert tensor_checksum(torch.zeros(3)) != tensor_checksum(torch.zeros(4))


def checksum_by_definition(tensor: torch.Tensor) -> str:
    """Each number, read as an integer, times the number of its place in a block of 65,536 and that of its block."""
    values = tensor + 0.0 if tensor.is_floating_point() else tensor
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    mixed = torch.arange(1, 65_537) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    places = (mixed ^ (mixed >> 27)) | 1
    total = torch.zeros((), dtype=torch.int64)
    for block, part in enumerate(values.contiguous().flatten().view(integers).split(65_536)):
        total += (part.long() * places[: len(part)]).sum() * places[block % 65_536]
    return f"{total.item() % 2**64:016x}-{tensor.numel()}-{str(tensor.dtype).removeprefix('torch.')}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("size", [0, 1, 1000, 65_536, 65_537, 4 * 65_536, 5 * 65_536 + 123])
def test_a_checksum_is_that_of_its_definition_however_many_blocks_are_computed_at_once(
    dtype: torch.dtype, size: int
) -> None:
    tensor = torch.randn(size).mul(100).to(dtype)
    assert tensor_checksum(tensor) == checksum_by_definition(tensor)


def test_the_checksums_of_strided_tensors_and_single_numbers_are_those_of_their_values() -> None:
    matrix = torch.randn(301, 999)
    for tensor in (matrix.t(), matrix[:, 1::3], matrix[5:5], matrix[0, 0], matrix.bfloat16()[::2]):
        assert tensor_checksum(tensor) == checksum_by_definition(tensor)


def test_a_checksum_stays_the_one_that_engines_of_another_release_compute() -> None:
    assert tensor_checksum(torch.arange(200_000, dtype=torch.float32)) == "8424fa416549cb00-200000-float32"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("size", [300_000, 130 * 65_536 + 5])
def test_a_device_computes_the_same_checksum(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randn(size).mul(100).to(dtype)
    assert tensor_checksum(tensor.cuda()) == tensor_checksum(tensor)


def test_minus_zero_is_zero() -> None:
    assert tensor_checksum(torch.tensor([0.0])) == tensor_checksum(torch.tensor([-0.0]))


def test_a_difference_names_the_tensor_and_an_empty_comparison_proves_nothing() -> None:
    with pytest.raises(WeightMismatchError, match="1 of 2 compared tensors differ in the engine: b"):
        require_equal({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9"}, where="the engine")
    with pytest.raises(WeightMismatchError, match="no tensor could be compared"):
        require_equal({"a": "1"}, {}, where="the engine")
