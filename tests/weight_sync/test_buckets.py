"""Buckets carry every tensor unchanged and stay within their size."""

from __future__ import annotations

import pytest
import torch

from dovetail.weight_sync import iter_buckets
from dovetail.weight_sync.buckets import Bucket, entries_of

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
