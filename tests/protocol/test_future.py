"""`DataProtoFuture`: lazily collected batches, with any kind of future."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from dovetail.protocol import DataProto, DataProtoFuture
from tests.protocol.batches import assert_same, make_batch

pytestmark = pytest.mark.unit


def wait_threads(futures: Sequence[Any]) -> list[Any]:
    return [future.result(timeout=5) for future in futures]


def test_nothing_is_waited_for_until_get() -> None:
    batch = make_batch(8)
    futures: list[Future] = [Future(), Future()]
    whole = DataProtoFuture.concat(futures, wait=wait_threads)
    parts = whole.chunk(4)
    quarters_of_halves = whole.chunk(2)[1].chunk(2)
    for future, part in zip(futures, batch.chunk(2), strict=True):
        future.set_result(part)
    assert_same(whole.get(), batch)
    for part, expected in zip(parts, batch.chunk(4), strict=True):
        assert_same(part.get(), expected)
    assert_same(quarters_of_halves[0].get(), batch.chunk(4)[2])


def test_a_worker_that_returns_something_else_is_named() -> None:
    futures: list[Future] = [Future(), Future()]
    futures[0].set_result(make_batch(1))
    futures[1].set_result({"loss": 1.0})
    with pytest.raises(TypeError, match="future 1 of 2 gave a dict"):
        DataProtoFuture.concat(futures, wait=wait_threads).get()


def test_a_future_pickles_with_its_part() -> None:
    whole = DataProtoFuture(collect_fn=DataProto.concat, futures=[1, 2], wait=_fake_batches)
    part = pickle.loads(pickle.dumps(whole.chunk(3)[1]))
    assert_same(part.get(), make_batch(3).chunk(3)[1])


def test_importing_the_protocol_does_not_import_ray() -> None:
    code = "import sys, dovetail.protocol; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _fake_batches(futures: Sequence[Any]) -> list[DataProto]:
    return [make_batch(3)[:1], make_batch(3)[1:]]
