"""A group that carries weights fails by itself: it raises, it is aborted, it gives everything back.

There is no NCCL on the CPU. `LikeNccl` stands in for torch's class and behaves as it does: `wait` does not block the
host unless the group was built so, a dead peer goes unnoticed, and errors are reported later, by ending the process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from dovetail.backends.base import TrainBackend
from dovetail.config.rollout import RolloutConfig
from dovetail.observability import waits as waits_module
from dovetail.rollout.base import EngineError
from dovetail.rollout.loop_thread import LoopThread
from dovetail.rollout.remote.client import ServerGoneError
from dovetail.rollout.remote.dialect import ServerInfo
from dovetail.rollout.remote.weights import GroupChannel
from dovetail.weight_sync import (
    Announcements,
    BroadcastFailedError,
    GroupAddress,
    GroupFailedError,
    WeightReceiver,
    WeightSender,
    cancel_broadcast,
    in_engine_dtype,
)
from dovetail.weight_sync import broadcast as broadcast_module
from dovetail.weight_sync import checksum as checksum_module
from dovetail.weight_sync import group as group_module
from dovetail.workers.weight_sending import WeightSending
from tests.waiting import on_thread, wait_until

pytestmark = pytest.mark.unit

FP32 = [("model.layers.0.mlp.up_proj.weight", torch.randn(64, 32)), ("model.norm.weight", torch.randn(32))]


class LikeNccl:
    """`outcome`: what becomes of the next broadcasts."""

    Options = SimpleNamespace
    outcome = "done"
    built: ClassVar[list[LikeNccl]] = []
    all_joined: ClassVar[threading.Event] = threading.Event()

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.store = store
        self.raises = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"
        self.num_aborted = 0
        LikeNccl.built.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        if LikeNccl.outcome == "building":  # as ncclCommInitRank, which takes no time limit
            LikeNccl.all_joined.wait(60)
            LikeNccl.outcome = "done"
        return LikeWork(self)

    def abort(self) -> None:
        self.num_aborted += 1


class LikeWork:
    def __init__(self, group: LikeNccl) -> None:
        self._group = group
        self._num_polls = 0

    def is_completed(self) -> bool:
        self._num_polls += 1
        return {"done": True, "dead": False, "late error": self._num_polls > 20}[LikeNccl.outcome]

    def wait(self, timeout: timedelta) -> bool:
        assert timeout > timedelta(0)
        assert self._group.raises, "the watchdog of NCCL would end this process"
        if LikeNccl.outcome != "done":
            raise RuntimeError("NCCL error: remote process exited")
        return True


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[LikeNccl]:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", LikeNccl, raising=False)
    monkeypatch.setattr(LikeNccl, "built", [])
    monkeypatch.setattr(LikeNccl, "outcome", "done")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    return LikeNccl


def test_only_this_group_is_built_to_raise(nccl: type[LikeNccl]) -> None:
    sender = WeightSender(1, backend="nccl", timeout_s=60)
    sender.connect()
    assert nccl.built[0].raises
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ, "the groups of training keep their watchdog"


@pytest.mark.parametrize("outcome", ["late error", "dead"])
def test_a_peer_that_died_is_an_error_of_this_update_and_the_communicator_is_aborted(
    nccl: type[LikeNccl], outcome: str
) -> None:
    sender = WeightSender(1, backend="nccl", timeout_s=60)
    sender.connect()
    nccl.outcome = outcome
    if outcome == "dead":  # nobody notices but the driver, who has seen the engine's process end
        cancel_broadcast(sender.address, "rollout[rank 0] died")
    with pytest.raises(GroupFailedError, match="rank 0. died" if outcome == "dead" else "remote process exited"):
        sender.send(FP32)
    assert nccl.built[0].num_aborted == 1
    with pytest.raises(GroupFailedError, match="is closed"):
        sender.send(FP32)


def test_a_peer_that_never_comes_is_named_with_the_time_that_was_waited(nccl: type[LikeNccl]) -> None:
    sender = WeightSender(2, backend="nccl", timeout_s=0.3)
    nccl.outcome = "dead"
    with pytest.raises(GroupFailedError, match=r"rank 0 waits for the other 2 members of dovetail-weights-.*limit 0 s"):
        sender.send(FP32)


def test_a_communicator_that_never_comes_up_is_named_with_who_waits_for_whom(
    nccl: type[LikeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "all_joined", threading.Event())
    monkeypatch.setattr(broadcast_module, "_LINGER_S", 0.0)  # nobody reads what it announces
    sender = WeightSender(2, backend="nccl", timeout_s=0.2)
    nccl.outcome = "building"
    sending = threading.Thread(target=sender.send, args=(FP32,), daemon=True)
    sending.start()
    name = sender.address.group_name
    (wait,) = wait_until(lambda: [w for w in waits_module._REGISTER.look() if name in w.what], "a wait over its limit")
    assert str(wait).startswith(f"rank 0 waits for the other 2 members of {name} to take part in a broadcast")
    nccl.all_joined.set()
    sending.join(60)
    assert not sending.is_alive()


def test_a_sender_that_says_nothing_is_named_by_the_receiver() -> None:
    sender = WeightSender(1, timeout_s=0.3)
    announcements = Announcements(sender.address)
    words = rf"a receiver waits for the sender of weights at .*:{sender.address.port} to announce bucket 0"
    with pytest.raises(BroadcastFailedError, match=words):
        next(announcements.update())


def backend_of(weights: list[tuple[str, torch.Tensor]]) -> Any:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=99))
    return SimpleNamespace(
        rank_info=SimpleNamespace(rank=0),
        device=torch.device("cpu"),
        hf_config=config,
        named_weights=lambda: iter(weights),
    )


def is_served(address: GroupAddress) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address.host, address.port)) == 0


def test_each_restart_of_the_engines_gives_back_the_group_before(
    nccl: type[LikeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A sender on the CPU takes gloo: the class is the same one as for NCCL here, the tensors stay where they are.
    monkeypatch.setitem(group_module.BUILDERS, "gloo", group_module.BUILDERS["nccl"])
    sending = WeightSending(backend_of(FP32), RolloutConfig())
    addresses = []
    for _ in range(4):
        address = sending.open(1, "127.0.0.1")
        assert address is not None
        addresses.append(address)
        assert sending.connect().problem == ""
        nccl.outcome = "dead"
        cancel_broadcast(address, "the engine died")
        assert "the engine died" in sending.send().problem
        nccl.outcome = "done"
        # Whoever asks for one more update before engines have joined anew is told so.
        assert "is closed" in sending.send().problem
    assert [group.num_aborted for group in nccl.built] == [1, 1, 1, 1]
    nccl.built.clear()  # torch's own group lets go of the store when it is dropped
    assert [is_served(address) for address in addresses] == [False] * 4


def receive(address: GroupAddress) -> dict[str, torch.Tensor]:
    buckets = WeightReceiver(address, 1).buckets()
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors()}


@pytest.mark.parametrize("check", [False, True])
def test_an_update_hashes_nothing_unless_asked_and_travels_in_the_engines_dtype(
    monkeypatch: pytest.MonkeyPatch, check: bool
) -> None:
    hashed, sent = [], []
    real_hash, real_broadcast = checksum_module.tensor_checksum, group_module.TransferGroup.broadcast

    def counted_hash(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> str:
        hashed.append(tensor.numel())
        return real_hash(tensor, dtype)

    def counted_broadcast(self: Any, tensor: torch.Tensor) -> None:
        if self._rank == 0:
            sent.append(tensor.nbytes)
        real_broadcast(self, tensor)

    monkeypatch.setattr(checksum_module, "tensor_checksum", counted_hash)
    monkeypatch.setattr(group_module.TransferGroup, "broadcast", counted_broadcast)
    backend: TrainBackend = backend_of(FP32)
    sending = WeightSending(backend, RolloutConfig(dtype="bfloat16"))
    address = sending.open(1, "127.0.0.1")
    assert address is not None
    receiving = on_thread(receive, address)
    result = sending.send(check=check)
    received = receiving.result(60)
    assert result.problem == ""
    assert sum(sent) == 64 * 32 * 2 + 32 * 4
    assert received["model.layers.0.mlp.up_proj.weight"].equal(FP32[0][1].bfloat16())
    assert received["model.norm.weight"].equal(FP32[1][1])
    assert sum(hashed) == (64 * 32 + 32 if check else 0)
    assert (result.sent is not None) == check


def test_what_engines_keep_in_full_precision_and_small_dtypes_travel_as_they_are() -> None:
    matrix, half = torch.randn(4, 4), torch.randn(4, 4).bfloat16()
    stream = [
        ("model.layers.0.mlp.gate.weight", matrix),
        ("model.layers.0.mlp.gate_proj.weight", matrix),
        ("backbone.mixer.A_log", matrix),
        ("model.layers.0.mlp.router.weight", matrix),
        ("lm_head.weight", half),
        ("steps", torch.ones(2, 2, dtype=torch.int64)),
    ]
    dtypes = [tensor.dtype for _, tensor in in_engine_dtype(stream, "bfloat16")]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, torch.int64]
    assert [tensor.dtype for _, tensor in in_engine_dtype(stream, "float32")][4] == torch.bfloat16
    assert all(ours is theirs for (_, ours), (_, theirs) in zip(in_engine_dtype(stream, None), stream, strict=True))


def test_an_announcement_of_a_sender_that_closed_says_so() -> None:
    sender = WeightSender(1, timeout_s=60)
    joining = on_thread(WeightReceiver, sender.address, 1)
    sender.connect()
    joining.result(60)
    sender.close()
    with pytest.raises(RuntimeError, match="left the group"):
        next(Announcements(sender.address).update())


# ---- servers that do not join ----


class Joining:
    """Calls to servers that join a group; one of them is in it when its answer is lost."""

    def __init__(self) -> None:
        self.receivers: list[WeightReceiver] = []

    async def begin_update(self, server: str, expected: Any) -> None: ...

    async def join_group(self, server: str, address: GroupAddress, rank: int) -> None:
        self.receivers.append(await asyncio.to_thread(WeightReceiver, address, rank))
        if server.endswith("2"):
            raise ServerGoneError("the connection broke", url=server)


def test_a_group_that_could_not_be_built_is_left_at_once() -> None:
    """Whoever has joined it gets an error, also while somebody still holds the exception."""
    dialect: Any = Joining()
    info = ServerInfo(64, "raw")
    expected: Any = None
    loop = LoopThread("channel")
    channel = GroupChannel(dialect, loop, expected, 1024, "gloo", torch.device("cpu"))
    with pytest.raises(EngineError, match="could not be built: the connection broke") as caught:
        channel.deliver({"http://127.0.0.1:1": info, "http://127.0.0.1:2": info}, FP32)
    errors = [on_thread(list, receiver.buckets()).exception(20) for receiver in dialect.receivers]
    assert [type(error) for error in errors] == [BroadcastFailedError] * 2, caught
    assert all("it left the group" in str(error) for error in errors)
    loop.close()


def test_a_sender_that_was_closed_while_it_connected_leaves_the_group_when_it_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, building, may_build = LikeNccl(None, 0, 2, None), threading.Event(), threading.Event()

    def build(*args: Any) -> LikeNccl:
        building.set()
        assert may_build.wait(30)
        return group

    monkeypatch.setitem(group_module.BUILDERS, "gloo", build)
    sender = WeightSender(1)
    connecting = on_thread(sender.connect)
    assert building.wait(30)
    sender.close()
    may_build.set()
    with pytest.raises(GroupFailedError, match="closed before every receiver had joined"):
        connecting.result(30)
    assert group.num_aborted == 1
