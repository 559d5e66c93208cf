"""SGLang's own server: `/generate` with token ids, its routes for pause, caches and weights.

Never makes the calls that are known to end the server: no cache is flushed inside an update, no memory is resumed that
was not released, none is released while a request runs, no update names a group that the server is not in.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import math
import pickle
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dovetail.config.units import GIB
from dovetail.rollout.base import EngineError, LogprobsMode, MemoryTag, WeightUpdateError
from dovetail.rollout.remote.client import ServerError
from dovetail.rollout.remote.dialect import (
    COUNT_TIMEOUT_S,
    PAUSE_TIMEOUT_S,
    Dialect,
    ServerInfo,
    finish_reason,
    understood,
)
from dovetail.rollout.remote.samples import Part, RemoteSample
from dovetail.weight_sync import Announcements, Bucket, ExpectedWeights, GroupAddress, WeightAccount, tensor_checksum

_LONG_S = 3600.0
_FLUSH_TRIES = 150
_FLUSH_PAUSE_S = 0.1
_MAX_SEED = 2**31 - 1
_MAX_READ_BACK = 8, 1 << 18  # tensors, and elements of each: SGLang spells them out as numbers


class SGLangDialect(Dialect):
    """`max_model_len` is the run's, and `logprobs` what the servers were started with: they do not say their own.

    `shared` says that others may call the servers too. Then they are paused for an update; otherwise it is enough that
    this process calls none, which saves the second that SGLang takes to notice that nothing runs.
    """

    name = "sglang"
    parts_have_version = True
    # SGLang's /health generates a token, which counts as a running request and needs memory that may be released.
    health_path = "/model_info"

    def __init__(
        self, client: Any, *, max_model_len: int, logprobs: LogprobsMode = "temperature", shared: bool = True
    ) -> None:
        super().__init__(client)
        self._max_model_len = max_model_len
        self._logprobs: LogprobsMode = logprobs
        self.shared = shared
        self._server_info: dict[str, Mapping[str, Any]] = {}
        self._groups: dict[str, tuple[GroupAddress, Announcements]] = {}
        self._updates: dict[str, tuple[ExpectedWeights, WeightAccount]] = {}

    async def info(self, server: str) -> ServerInfo:
        answer = await self.client.get(f"{server}/model_info")
        if server not in self._server_info:
            self._server_info[server] = await self.client.get(f"{server}/server_info")
        own = self._server_info[server]
        with understood(server, answer):
            shape = {"model_type": answer["model_type"]} if answer.get("model_type") else {}
            version = _version(answer["weight_version"])
        with understood(server, own):
            usage = (own.get("internal_states") or [{}])[0].get("memory_usage", {})
            return ServerInfo(
                self._max_model_len,
                self._logprobs,
                weight_version=version,
                num_workers=int(own["tp_size"]) * int(own.get("pp_size", 1)),
                kv_cache_bytes=int(float(usage.get("kvcache", 0.0)) * GIB),
                shape=shape,
                deterministic=bool(own.get("enable_deterministic_inference")),
            )

    async def complete(self, server: str, sample: RemoteSample) -> Part:
        sampling = sample.request.sampling
        body = {
            "input_ids": sample.sequence,
            "rid": sample.call_id,
            "return_logprob": True,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k if sampling.top_k > 0 else -1,
                "min_p": sampling.min_p,
                "max_new_tokens": sample.remaining,
                "stop_token_ids": sorted(sample.stop_token_ids),
                "ignore_eos": sampling.ignore_eos,
                "skip_special_tokens": False,
                # Read by servers with --enable-deterministic-inference only, as a hash of seed and position: a
                # continued response goes on with the same numbers.
                "sampling_seed": sample.seed & _MAX_SEED,
            },
        }
        answer = await self.client.post(f"{server}/generate", body, timeout_s=None)
        with understood(server, answer):
            meta = answer["meta_info"]
            entries = meta.get("output_token_logprobs") or []
            tokens = [int(entry[1]) for entry in entries]
            reason = finish_reason(server, meta["finish_reason"]["type"])
            end = next((at + 1 for at, token in enumerate(tokens) if token in sample.stop_token_ids), None)
            if end is not None:
                # SGLang does not look for stop tokens in a request that ignores end-of-sequence tokens.
                tokens, reason = tokens[:end], "stop"
            elif reason == "stop" and tokens:
                # SGLang also stops at the end-of-sequence ids of config.json, beside those of generation_config.json.
                reason = "abort"  # of the call; the response goes on in another one
            return Part(
                tokens,
                [float(entry[0]) for entry in entries[: len(tokens)]],
                reason,
                weight_version=_version(meta.get("weight_version")),
            )

    async def num_tokens(self, server: str) -> int:
        """Places in the KV cache that running requests hold."""
        answer = await self.client.get(f"{server}/v1/loads?include=core", timeout_s=COUNT_TIMEOUT_S)
        with understood(server, answer):
            return sum(int(load["num_used_tokens"]) for load in answer["loads"])

    async def abort(self, server: str, call_ids: Collection[str]) -> None:
        await asyncio.gather(*(self.client.post(f"{server}/abort_request", {"rid": call_id}) for call_id in call_ids))

    async def pause(self, server: str) -> None:
        if self.shared:
            await self._post(server, "/pause_generation", {"mode": "abort"}, PAUSE_TIMEOUT_S)

    async def resume(self, server: str) -> None:
        if self.shared:
            await self.client.post(f"{server}/continue_generation", {})

    async def forget_caches(self, server: str) -> None:
        """Refused while a request is pending, which it is for a moment after its end."""
        for last in [False] * _FLUSH_TRIES + [True]:
            try:
                await self.client.post(f"{server}/flush_cache")
            except ServerError as error:
                if error.status != 400 or last:
                    raise
                await asyncio.sleep(_FLUSH_PAUSE_S)
            else:
                return

    async def sleep(self, server: str, tags: Collection[MemoryTag]) -> None:
        await self.forget_caches(server)  # which proves that no request is pending: SGLang would die of one
        await self._post(server, "/release_memory_occupation", {"tags": sorted(tags)})

    async def wake(self, server: str, tags: Collection[MemoryTag]) -> None:
        await self._post(server, "/resume_memory_occupation", {"tags": sorted(tags)})

    async def begin_update(self, server: str, expected: ExpectedWeights) -> None:
        """From here on the weights are of no version, until `set_version`."""
        self._updates[server] = expected, WeightAccount(expected)
        await self._name_version(server, "incomplete")
        # Also before: a request that ended a moment ago may still be pending.
        await self.forget_caches(server)

    async def load_from_disk(self, server: str, folder: Path, expected: ExpectedWeights) -> None:
        await self.begin_update(server, expected)
        # An update that flushes the cache itself ends the server if a request is pending: `forget_caches` does it.
        # The format is named, because it would take the one it was started with: dummy, usually.
        body = {"model_path": str(folder), "load_format": "auto", "flush_cache": False}
        try:
            await self._post(server, "/update_weights_from_disk", body)
        except ServerError as error:
            if error.status == 400:
                raise WeightUpdateError(f"{server} did not take the weights: {error.body}") from error
            raise

    async def load_file(self, server: str, path: Path) -> None:
        # One payload for each tensor-parallel rank: every one reads all and keeps its part.
        payload = base64.b64encode(pickle.dumps(_TensorsIn(path), protocol=4)).decode()
        payloads = [payload] * int(self._server_info[server]["tp_size"])
        body = {"serialized_named_tensors": payloads, "flush_cache": False}
        await self._post(server, "/update_weights_from_tensor", body)

    async def join_group(self, server: str, address: GroupAddress, first_rank: int) -> None:
        await self.leave_group(server)
        body = {
            "master_address": address.host,
            "master_port": address.port,
            "rank_offset": first_rank,
            "world_size": address.world_size,
            "group_name": address.group_name,
            "backend": address.backend,
        }
        await self._post(server, "/init_weights_update_group", body)
        num_ranks = int(self._server_info[server]["tp_size"])
        self._groups[server] = address, await asyncio.to_thread(Announcements, address, num_ranks)

    async def leave_group(self, server: str) -> None:
        """Who waits for the server in a broadcast then gets an error."""
        if server in self._groups:
            address, _ = self._groups.pop(server)
            with suppress(ServerError):  # who has died has left
                await self._post(server, "/destroy_weights_update_group", {"group_name": address.group_name})

    def restarted(self, server: str) -> None:
        """The server is a new process: it is in no group."""
        self._groups.pop(server, None)

    def in_group(self, server: str) -> bool:
        return server in self._groups

    async def receive(self, server: str) -> str | None:
        """The bytes go from the sender to SGLang's processes. SGLang receives what it is asked to receive, in that
        order, so each announced bucket is checked here and becomes one call per contiguous run."""
        if server not in self._groups:
            raise EngineError(f"{server} is in no weight group; call join_weight_group.")
        address, announcements = self._groups[server]
        expected, account = self._updates[server]
        update = announcements.update()
        try:
            while entries := await asyncio.to_thread(next, update, ()):
                for entry in entries:
                    problem = account.problem_with(entry.name, entry.shape)
                    if problem is not None:
                        await self.leave_group(server)
                        return problem
                for run, _ in Bucket(entries, torch.empty(0)).runs():
                    body = {
                        "names": [expected.ties.get(entry.name, entry.name) for entry in run],
                        "dtypes": [entry.dtype for entry in run],
                        "shapes": [list(entry.shape) for entry in run],
                        "group_name": address.group_name,
                        "load_format": "flattened_bucket",
                        "flush_cache": False,
                    }
                    await self._post(server, "/update_weights_from_distributed", body)
        except ServerError:
            await self.leave_group(server)
            raise
        return None

    async def finish_update(self, server: str) -> str | None:
        return self._updates[server][1].missing()

    async def set_version(self, server: str, version: int) -> None:
        await self._name_version(server, str(version))

    async def checksums(self, server: str, shapes: Mapping[str, tuple[int, ...]], dtype: str | None) -> dict[str, str]:
        """Of a few small tensors, of model families that SGLang can read back (Llama and its like), not in parts."""
        if int(self._server_info[server]["tp_size"]) > 1:
            return {}
        count, elements = _MAX_READ_BACK
        small = [name for name, shape in shapes.items() if math.prod(shape) <= elements]
        held: dict[str, str] = {}
        for name in small[:count]:
            body = {"name": name, "truncate_size": max(shapes[name])}
            try:
                answer = await self._post(server, "/get_weights_by_name", body)
            except ServerError as error:
                if error.status == 0:
                    raise
                return {}  # a family that cannot be read back, such as Qwen2
            if isinstance(answer, list) and answer:
                tensor = torch.tensor(answer, dtype=torch.float32)
                if tuple(tensor.shape) == shapes[name]:
                    held[name] = tensor_checksum(tensor, None if dtype is None else getattr(torch, dtype))
        return held

    async def _post(self, server: str, route: str, body: Mapping[str, Any], timeout_s: float = _LONG_S) -> Any:
        """For as long as it takes, usually. SGLang says in some answers that it did not do what it was asked."""
        answer = await self.client.post(server + route, body, timeout_s=timeout_s)
        if isinstance(answer, dict) and not answer.get("success", True):
            why = str(answer.get("message"))
            raise ServerError(f"{server}{route}: {why}", url=server, status=400, body=why)
        return answer

    async def _name_version(self, server: str, name: str) -> None:
        await self._post(server, "/update_weight_version", {"new_version": name, "abort_all_requests": False})


def _version(name: object) -> int | None:
    """SGLang calls it "default" before the first update."""
    return int(str(name)) if str(name).isdecimal() else None


class _TensorsIn:
    """Unpickled, it is the list of (name, tensor) in the file: SGLang unpickles what it is sent in its scheduler, and
    allows functions of torch. The other way, handles of torch.multiprocessing, needs a manager process that keeps this
    process's output open, and sockets that two environments cannot share."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return functools.partial(torch.load, mmap=True, weights_only=True, map_location="cpu"), (self._path,)
