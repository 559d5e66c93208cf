"""Weights to SGLang servers by broadcast: SGLang's own protocol, in which every bucket is announced over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from dovetail.rollout.base import EngineError, WeightUpdateError
from dovetail.rollout.remote.client import ServerError
from dovetail.rollout.remote.dialect import ServerInfo
from dovetail.rollout.remote.loop import LoopThread
from dovetail.rollout.remote.sglang_dialect import SGLangDialect
from dovetail.rollout.remote.weights import BroadcastChannel, Failures, own_address
from dovetail.rollout.sglang.group import WeightGroup
from dovetail.rollout.sglang.weights import CheckedWeights
from dovetail.weight_sync import Bucket, ExpectedWeights, iter_buckets


class SGLangGroupChannel(BroadcastChannel):
    """All servers must have the same number of model processes."""

    def __init__(self, dialect: SGLangDialect, loop: LoopThread, expected: ExpectedWeights, **options: Any) -> None:
        super().__init__(dialect, loop, expected, **options)
        self._sglang = dialect
        self._group: WeightGroup | None = None
        self._members: list[str] = []

    def deliver(self, servers: Mapping[str, ServerInfo]) -> Failures:
        checked = CheckedWeights(self._weights, self._expected)
        try:
            group = self._join(servers)
            self._loop.run(self._begin_all())
            for bucket in iter_buckets(checked, self._bucket_bytes):
                self._send(group, bucket)
            checked.require_complete()
        except WeightUpdateError:
            raise
        except BaseException:
            self._close()
            raise
        finally:
            self._weights = ()
        return {}

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    async def _begin_all(self) -> None:
        await asyncio.gather(*(self._sglang.begin_update(server, self._expected) for server in self._members))

    def _send(self, group: WeightGroup, bucket: Bucket) -> None:
        body = {
            "names": [entry.name for entry in bucket.entries],
            "dtypes": [entry.dtype for entry in bucket.entries],
            "shapes": [list(entry.shape) for entry in bucket.entries],
            "group_name": group.name,
            "flush_cache": False,
        }
        receiving = self._loop.start(self._tell("/update_weights_from_distributed", dict.fromkeys(self._members, body)))
        try:
            for _, tensor in bucket.tensors():
                group.broadcast(tensor)
        except RuntimeError as error:
            raise EngineError(
                f"the broadcast of weights broke off ({error}). The next update builds the group anew; "
                "rollout.weight_sync=disk needs no group."
            ) from error
        failures = receiving.result()
        if failures:
            raise EngineError(f"weights were not taken: {'; '.join(map(str, failures.values()))}")

    def _join(self, servers: Mapping[str, ServerInfo]) -> WeightGroup:
        if self._group is not None and self._members == list(servers):
            return self._group
        sizes = {info.num_workers for info in servers.values()}
        if len(sizes) > 1:
            raise EngineError(
                f"SGLang servers with {sorted(sizes)} processes cannot share a group; use weight_sync=disk."
            )
        self._close()
        self._members = list(servers)
        group = WeightGroup(
            len(servers), sizes.pop(), backend=self._backend, device=self._device, host=own_address(servers)
        )
        bodies = {server: group.join_body(index) for index, server in enumerate(servers)}
        self._complete(group.connect, self._tell("/init_weights_update_group", bodies))
        self._group = group
        return group

    async def _tell(self, route: str, bodies: Mapping[str, Mapping[str, Any]]) -> Failures:
        async def tell(server: str) -> None:
            answer = await self._sglang.post(server, route, bodies[server])
            if isinstance(answer, dict) and not answer.get("success", True):
                raise ServerError(f"{server}{route}: {answer.get('message')}", url=server)

        return await self._on_each(bodies, tell)
