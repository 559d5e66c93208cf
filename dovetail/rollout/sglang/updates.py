"""Weights into SGLang's instances, by whichever way they come: shared memory, a process group, a folder.

Every update finds the engine idle and is checked tensor by tensor before SGLang sees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from dovetail.rollout.base import EngineDiedError, EngineError
from dovetail.rollout.remote.loop import LoopThread
from dovetail.rollout.sglang.core import BodyOf, Core
from dovetail.rollout.sglang.group import WeightGroup
from dovetail.rollout.sglang.joined import JoinedGroup
from dovetail.rollout.sglang.link import RefusedError
from dovetail.rollout.sglang.weights import CheckedWeights, TensorFiles, check_folder
from dovetail.weight_sync import (
    BroadcastFailedError,
    DiskVersion,
    ExpectedWeights,
    GroupAddress,
    NamedTensors,
    iter_buckets,
    tensor_checksum,
)
from dovetail.weight_sync.group import GroupBackend

_MAX_READ_BACK = 8, 1 << 18  # tensors, and elements of each: SGLang spells them out as numbers


class WeightUpdates:
    """Of `num_instances` instances with `workers_each` model processes. `revive` is called before each update: it may
    start dead instances again."""

    def __init__(
        self,
        core: Core,
        loop: LoopThread,
        expected: ExpectedWeights,
        *,
        num_instances: int,
        workers_each: int,
        bucket_bytes: int,
        revive: Callable[[], object],
    ) -> None:
        self._core = core
        self._loop = loop
        self._expected = expected
        self._num_instances = num_instances
        self._workers_each = workers_each
        self._bucket_bytes = bucket_bytes
        self._revive = revive
        self._group: WeightGroup | None = None  # whose sender is this process
        self._joined: JoinedGroup | None = None  # whose sender is a trainer

    def through_shared_memory(self, weights: NamedTensors, version: int) -> None:
        checked = CheckedWeights(weights, self._expected)
        with checked, self._updating(version) as note, TensorFiles(self._bucket_bytes) as files:
            for payload in files.payloads(checked):
                # One payload for each tensor-parallel rank: every one reads all and keeps its part.
                payloads = [payload] * self._workers_each
                self._call("/update_weights_from_tensor", {"serialized_named_tensors": payloads, **note})
            checked.require_complete()

    def by_broadcast(
        self, weights: NamedTensors, version: int, *, backend: GroupBackend, device: torch.device | str
    ) -> None:
        """From this process to SGLang's, which join its group at the first call."""
        checked = CheckedWeights(weights, self._expected)
        with checked, self._updating(version) as note:
            group = self._group or self._open_group(backend, device)
            for bucket in iter_buckets(checked, self._bucket_bytes):
                names = {
                    "names": [entry.name for entry in bucket.entries],
                    "dtypes": [entry.dtype for entry in bucket.entries],
                    "shapes": [list(entry.shape) for entry in bucket.entries],
                }
                receiving = self._loop.start(
                    self._core.call_all("/update_weights_from_distributed", names | {"group_name": group.name} | note)
                )
                for _, tensor in bucket.tensors():
                    group.broadcast(tensor)
                receiving.result()
            checked.require_complete()

    def join(self, address: GroupAddress, first_rank: int) -> None:
        """SGLang's processes join a trainer's group, and leave what they were in."""
        self._leave()
        joined = JoinedGroup(address, first_rank, num_instances=self._num_instances, workers_each=self._workers_each)
        self._call("/init_weights_update_group", joined.join_body)
        self._joined = joined

    def receive(self, version: int) -> None:
        """Over the group that was joined. After an update that does not fit, SGLang is no longer in it: the sender
        waits for nobody."""
        if self._core.deaths and not self._core.closed:  # one started again would not be in the group
            raise EngineDiedError(self._core.deaths[0])
        if self._joined is None:
            raise EngineError("the engine is in no weight group, or was started again; call join_weight_group.")
        with self._updating(version) as note:
            try:
                for body in self._joined.receive_bodies(self._expected):
                    self._call("/update_weights_from_distributed", body | note)
            except BroadcastFailedError:
                raise  # between two buckets, and everybody knows
            except BaseException:
                self._leave()
                raise

    def from_disk(self, found: DiskVersion) -> None:
        """From a folder that SGLang's processes see."""
        with self._updating(found.version) as note:
            check_folder(found, self._expected)
            # Named, because it would take the format the engine was started with: dummy, usually.
            self._call("/update_weights_from_disk", {"model_path": str(found.folder), "load_format": "auto", **note})

    def forget_groups(self) -> None:
        """Their members are not all there any more."""
        group, self._group, self._joined = self._group, None, None
        if group is not None:
            group.close()

    def checksums(self, names: Sequence[str], dtype: torch.dtype | None) -> dict[str, str]:
        """Of a few small tensors, of model families that SGLang can read back (Llama and its like), not in parts."""
        if self._workers_each > 1:
            return {}
        count, elements = _MAX_READ_BACK
        small = [name for name in names if math.prod(self._expected.shapes.get(name, (elements + 1,))) <= elements]
        held: dict[str, str] = {}
        for name in small[:count]:
            shape = self._expected.shapes[name]
            try:
                answers = self._call("/get_weights_by_name", {"name": name, "truncate_size": max(shape)})
            except RefusedError:  # what a server answers for a family that cannot be read back, such as Qwen2
                return {}
            tensors = [_read_back(answer, shape) for answer in answers]
            if any(tensor is None for tensor in tensors):
                continue
            sums = {tensor_checksum(tensor, dtype) for tensor in tensors if tensor is not None}
            held[name] = sums.pop() if len(sums) == 1 else "servers differ"
        return held

    @contextmanager
    def _updating(self, version: int) -> Iterator[dict[str, Any]]:
        """Inside, the engine is idle. Yields what every update call carries: the flush comes once, at the end, when
        it can be refused without harm, and the version counts when all has arrived."""
        self._revive()
        self._loop.run(self._core.enter_update(version))
        done: int | None = None
        try:
            yield {"flush_cache": False, "weight_version": f"{version}-incomplete"}
            done = version
        finally:
            self._loop.run(self._core.leave_update(done))

    def _open_group(self, backend: GroupBackend, device: torch.device | str) -> WeightGroup:
        group = WeightGroup(self._num_instances, self._workers_each, backend=backend, device=device)
        joining = self._loop.start(self._core.call_all("/init_weights_update_group", group.join_body))
        group.connect()
        joining.result()
        # Only now is its name used: SGLang dies of an update over a group it does not know.
        self._group = group
        return group

    def _leave(self) -> None:
        if self._joined is not None:
            with suppress(EngineError):  # who has died has left
                self._call("/destroy_weights_update_group", {"group_name": self._joined.name})
            self._joined = None

    def _call(self, route: str, body: dict[str, Any] | BodyOf) -> list[Any]:
        return self._loop.run(self._core.call_all(route, body))


def _read_back(answer: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
    """What SGLang says of one tensor: nested lists, or nothing."""
    if not isinstance(answer, list) or not answer:
        return None
    tensor = torch.tensor(answer, dtype=torch.float32)
    return tensor if tuple(tensor.shape) == shape else None
