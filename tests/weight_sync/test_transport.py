"""Shared memory and broadcast between real processes."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dovetail.weight_sync import (
    BroadcastFailedError,
    WeightReceiver,
    WeightSender,
    read_bucket_file,
    shared_memory_buckets,
)
from tests.checksums import weight_checksum
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def _weights() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(3)
    return [(f"layer.{n}", torch.randn(40, n + 1)) for n in range(12)] + [("half", torch.randn(9).bfloat16())]


def _open_buckets() -> list[str]:
    """Files of buckets that this process has open."""
    files = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]
    return [file for file in files if "dovetail-weights" in file]


def _share(rank: int, world_size: int) -> tuple[dict[str, str], list[str]]:
    got: list[tuple[str, torch.Tensor]] = []
    if rank == 0:
        for path in shared_memory_buckets(_weights(), 2048):
            dist.broadcast_object_list([str(path)], src=0)
            dist.barrier()
        dist.broadcast_object_list([None], src=0)
        return weight_checksum(_weights()), _open_buckets()
    while True:
        message: list[str | None] = [None]
        dist.broadcast_object_list(message, src=0)
        if message[0] is None:
            # Every file is gone by now; what was read must still be there.
            return weight_checksum(got), []
        got += read_bucket_file(message[0])
        dist.barrier()


def test_another_process_reads_every_bucket_and_keeps_it_after_the_files_are_gone() -> None:
    (sent, left), (got, _) = run_ranks(_share, 2)
    assert got == sent
    assert left == []


def _broadcast(rank: int, world_size: int, fails: bool) -> tuple[str, dict[str, str]]:
    def source() -> object:
        for number, item in enumerate(_weights()):
            if fails and number == 9:
                raise RuntimeError("no more weights")
            yield item

    sender = WeightSender(world_size - 1, timeout_s=60) if rank == 0 else None
    address = [sender.address if sender else None]
    dist.broadcast_object_list(address, src=0)
    try:
        if sender is not None:
            sender.send(source(), 2048)
            sender.send(source(), 1 << 20)  # a second update over the same group
            return "", weight_checksum(_weights())
        assert address[0] is not None
        receiver = WeightReceiver(address[0], rank)
        first = weight_checksum(item for bucket in receiver.buckets() for item in bucket.tensors())
        second = weight_checksum(item for bucket in receiver.buckets() for item in bucket.tensors())
        assert first == second
        return "", second
    except (BroadcastFailedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", {}


def test_a_broadcast_reaches_every_receiver_again_and_again() -> None:
    results = run_ranks(_broadcast, 3, False)
    assert [checksums for _, checksums in results] == [weight_checksum(_weights())] * 3


def test_a_source_that_fails_is_reported_to_every_receiver() -> None:
    sender, *receivers = run_ranks(_broadcast, 3, True)
    assert sender[0] == "RuntimeError: no more weights"
    assert all("BroadcastFailedError" in text and "no more weights" in text for text, _ in receivers)


def _send_and_end(told: Any) -> None:
    sender = WeightSender(1, timeout_s=60)
    told.send(sender.address)
    sender.send(_weights(), 1 << 20)
    sender.send([])  # no bytes for which the receiver would be needed
    os._exit(0)


def test_nothing_is_lost_when_the_senders_process_ends_with_its_send() -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_and_end, args=(theirs,))
    process.start()
    receiver = WeightReceiver(ours.recv(), 1)
    assert weight_checksum(item for bucket in receiver.buckets() for item in bucket.tensors()) == weight_checksum(
        _weights()
    )
    process.join(0.5)  # one that did not wait for its reader would be gone, and its announcement with it
    assert list(receiver.buckets()) == []
    process.join(60)
    assert process.exitcode == 0


def _write_and_wait(told: Any) -> None:
    for path in shared_memory_buckets(_weights()):
        told.send(str(path))
        told.recv()


def test_a_writer_that_is_killed_leaves_nothing_in_memory_but_what_readers_have_mapped() -> None:
    before = set(Path("/dev/shm").glob("dovetail-*"))
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_write_and_wait, args=(theirs,))
    process.start()
    theirs.close()
    path = ours.recv()
    got = read_bucket_file(path)
    process.kill()
    process.join(60)
    assert weight_checksum(got) == weight_checksum(_weights())
    assert not os.path.exists(path)
    assert set(Path("/dev/shm").glob("dovetail-*")) <= before


def test_no_file_is_left_open_when_a_reader_fails() -> None:
    buckets = shared_memory_buckets(_weights())
    next(buckets)
    assert len(_open_buckets()) == 1
    buckets.close()
    assert _open_buckets() == []
