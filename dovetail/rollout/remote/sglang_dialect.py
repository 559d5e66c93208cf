"""SGLang's own server: `/generate` with token ids, its routes for pause, caches and weights.

Never makes the calls that are known to end the server: no cache is flushed inside an update, no memory is resumed that
was not released, none is released while a request runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from dovetail.rollout.base import MemoryTag, WeightUpdateError
from dovetail.rollout.remote.client import ServerError
from dovetail.rollout.remote.dialect import Dialect, ServerInfo, finish_reason, understood
from dovetail.rollout.remote.samples import Part, RemoteSample
from dovetail.weight_sync import DiskVersion, ExpectedWeights

_LONG_S = 3600.0
_FLUSH_TRIES = 50
_FLUSH_PAUSE_S = 0.1
_MAX_SEED = 2**31 - 1


class SGLangDialect(Dialect):
    """`max_model_len` is the run's: the server does not say its own."""

    name = "sglang"

    def __init__(self, client: Any, *, max_model_len: int) -> None:
        super().__init__(client)
        self._max_model_len = max_model_len
        self._num_workers: dict[str, int] = {}

    async def info(self, server: str) -> ServerInfo:
        answer = await self.client.get(f"{server}/model_info")
        if server not in self._num_workers:
            self._num_workers[server] = await self._count_workers(server)
        with understood(server, answer):
            model = str(answer["model_path"])
            shape = {"model_type": answer["model_type"]} if answer.get("model_type") else {}
            version = str(answer["weight_version"])
        return ServerInfo(
            model,
            self._max_model_len,
            "temperature",
            weight_version=int(version) if version.isdecimal() else None,  # "default" before the first update
            num_workers=self._num_workers[server],
            shape=shape,
        )

    async def complete(self, server: str, sample: RemoteSample) -> Part:
        sampling = sample.request.sampling
        body = {
            "input_ids": sample.prompt,
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
                # Heard by servers with --enable-deterministic-inference; the others draw as they like.
                "sampling_seed": sample.seed & _MAX_SEED,
            },
        }
        answer = await self.client.post(f"{server}/generate", body, timeout_s=None)
        with understood(server, answer):
            meta = answer["meta_info"]
            entries = meta["output_token_logprobs"]
            version = str(meta.get("weight_version", ""))
            tokens = [int(entry[1]) for entry in entries]
            reason = finish_reason(server, meta["finish_reason"]["type"])
            end = next((at + 1 for at, token in enumerate(tokens) if token in sample.stop_token_ids), None)
            if end is not None:
                # SGLang does not look for stop tokens in a request that ignores end-of-sequence tokens.
                tokens, reason = tokens[:end], "stop"
            return Part(
                tokens,
                [float(entry[0]) for entry in entries[: len(tokens)]],
                reason,
                weight_version=int(version) if version.isdecimal() else None,
            )

    async def abort(self, server: str, call_ids: Collection[str]) -> None:
        for call_id in call_ids:
            await self.client.post(f"{server}/abort_request", {"rid": call_id})

    async def pause(self, server: str) -> None:
        await self.client.post(f"{server}/pause_generation", {"mode": "abort"}, timeout_s=_LONG_S)

    async def resume(self, server: str) -> None:
        await self.client.post(f"{server}/continue_generation", {})

    async def forget_caches(self, server: str) -> None:
        """Refused while a request is pending, which ends within a moment of its connection."""
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
        await self.client.post(f"{server}/release_memory_occupation", {"tags": sorted(tags)}, timeout_s=_LONG_S)

    async def wake(self, server: str, tags: Collection[MemoryTag]) -> None:
        await self.client.post(f"{server}/resume_memory_occupation", {"tags": sorted(tags)}, timeout_s=_LONG_S)

    async def begin_update(self, server: str, expected: ExpectedWeights) -> None:
        """From here on the weights are of no version, until `set_version`."""
        await self._name_version(server, "incomplete")

    async def load_from_disk(self, server: str, found: DiskVersion, expected: ExpectedWeights) -> None:
        await self.begin_update(server, expected)
        # An update that flushes the cache itself ends the server if a request is pending: `forget_caches` does it.
        # The format is named, because it would take the one it was started with: dummy, usually.
        body = {"model_path": str(found.folder), "load_format": "auto", "flush_cache": False}
        try:
            answer = await self.client.post(f"{server}/update_weights_from_disk", body, timeout_s=_LONG_S)
        except ServerError as error:
            if error.status == 400:
                raise WeightUpdateError(f"{server} did not take the weights: {error.body}") from error
            raise
        if isinstance(answer, dict) and not answer.get("success", True):
            raise WeightUpdateError(f"{server} did not take the weights: {answer.get('message')}")

    async def set_version(self, server: str, version: int) -> None:
        await self._name_version(server, str(version))

    async def post(self, server: str, route: str, body: Mapping[str, Any]) -> Any:
        """Any other call, for as long as it takes."""
        return await self.client.post(server + route, body, timeout_s=_LONG_S)

    async def _name_version(self, server: str, name: str) -> None:
        await self.post(server, "/update_weight_version", {"new_version": name, "abort_all_requests": False})

    async def _count_workers(self, server: str) -> int:
        answer = await self.client.get(f"{server}/server_info")
        with understood(server, answer):
            return int(answer["tp_size"]) * int(answer.get("pp_size", 1))
