"""vLLM's OpenAI server: `/v1/completions` with token ids, and its development routes for everything else.

To follow a trainer it is started with VLLM_SERVER_DEV_MODE=1 and `--worker-extension-cls EXTENSION`. Without these it
generates with the weights it started with, at temperature 1 or greedily.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dovetail.rollout.base import ALL_TAGS, LogprobsMode, MemoryTag, WeightUpdateError
from dovetail.rollout.remote.client import HttpClient, ServerError
from dovetail.rollout.remote.dialect import (
    COUNT_TIMEOUT_S,
    PAUSE_TIMEOUT_S,
    Dialect,
    ServerInfo,
    finish_reason,
    understood,
)
from dovetail.rollout.remote.samples import Part, RemoteSample
from dovetail.weight_sync import ExpectedWeights, GroupAddress

EXTENSION = "dovetail.rollout.remote.vllm_extension.ServerExtension"
_HOW_TO = f"start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {EXTENSION}"
_RESET_TRIES = 20
_LONG_S = 3600.0


class VLLMDialect(Dialect):
    name = "vllm"

    def __init__(self, client: HttpClient, *, logprobs: LogprobsMode = "temperature") -> None:
        super().__init__(client)
        self._wanted_logprobs = logprobs
        self._models: dict[str, str] = {}

    async def info(self, server: str) -> ServerInfo:
        answer = await self.client.get(f"{server}/v1/models")
        with understood(server, answer):
            card = answer["data"][0]
            self._models[server], max_model_len = str(card["id"]), int(card["max_model_len"])
        try:
            extended = await self._call(server, "dovetail_server_info")
        except ServerError as error:
            if error.status == 404 or "dovetail_server_info" in error.body:
                why = f"the server {server} takes no weights: {_HOW_TO}"
                return ServerInfo(max_model_len, "raw", takes_no_weights=why)
            raise
        with understood(server, extended):
            first = extended[0]
            return ServerInfo(
                max_model_len,
                await self._logprobs(server, first["logprobs"]),
                weight_version=_common_version(extended),
                num_workers=int(first["num_workers"]),
                kv_cache_bytes=sum(int(size) for size in await self._call(server, "dovetail_kv_cache_bytes")),
                shape=first["shape"],
            )

    async def weight_version(self, server: str) -> int | None:
        extended = await self._call(server, "dovetail_server_info")
        with understood(server, extended):
            return _common_version(extended)

    async def complete(self, server: str, sample: RemoteSample) -> Part:
        sampling = sample.request.sampling
        body = {
            "model": self._models[server],
            "prompt": sample.sequence,
            "request_id": sample.call_id,
            "max_tokens": sample.remaining,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "min_p": sampling.min_p,
            "seed": sample.call_seed,
            "stop_token_ids": sorted(sample.stop_token_ids),
            "ignore_eos": True,
            # Said outright: a server takes what is left out from the model's generation_config.json.
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
        }
        answer = await self.client.post(f"{server}/v1/completions", body, timeout_s=None)
        with understood(server, answer):
            return part_of(server, answer["choices"][0], sample)

    async def num_tokens(self, server: str) -> int:
        lines = str(await self.client.get(f"{server}/metrics", timeout_s=COUNT_TIMEOUT_S)).splitlines()
        with understood(server, lines):
            counts = [line.split()[-1] for line in lines if line.startswith("vllm:generation_tokens_total")]
            if not counts:
                raise ServerError(f"{server}/metrics has no counts: it runs with --disable-log-stats.", url=server)
            return int(sum(map(float, counts)))

    async def abort(self, server: str, call_ids: Collection[str]) -> None:
        names = [f"cmpl-{call_id}-0" for call_id in call_ids]  # as the server calls them inside
        await self.client.post(f"{server}/abort_requests", {"request_ids": names})

    async def pause(self, server: str) -> None:
        await self.client.post(f"{server}/pause", query={"mode": "abort"}, timeout_s=PAUSE_TIMEOUT_S)

    async def resume(self, server: str) -> None:
        await self.client.post(f"{server}/resume")

    async def forget_caches(self, server: str) -> None:
        for _ in range(_RESET_TRIES):
            answer = await self.client.post(f"{server}/reset_prefix_cache", query={"reset_running_requests": "true"})
            # Older servers answer nothing, and have then always done it.
            if not isinstance(answer, dict) or answer.get("success", True):
                return
        raise ServerError(f"{server} did not forget its prefix cache after a weight update.", url=server)

    async def sleep(self, server: str, tags: Collection[MemoryTag]) -> None:
        """vLLM cannot keep its cache without its weights: giving back the weights gives back both."""
        weights_too = "weights" in tags
        await self.client.post(f"{server}/sleep", query={"level": "2" if weights_too else "1"}, timeout_s=_LONG_S)
        if not weights_too:
            await self.wake(server, ["weights"])

    async def wake(self, server: str, tags: Collection[MemoryTag]) -> None:
        query = {} if set(tags) == set(ALL_TAGS) else {"tags": next(iter(tags))}
        await self.client.post(f"{server}/wake_up", query=query, timeout_s=_LONG_S)

    async def load_from_disk(self, server: str, folder: Path, expected: ExpectedWeights) -> None:
        await self.begin_update(server, expected)
        problem: str | None = None
        for file in sorted(folder.glob("*.safetensors")):
            problem = problem or _first_problem(await self._call(server, "dovetail_load_file", (str(file),)))
        missing = await self.finish_update(server)
        if problem or missing:
            raise WeightUpdateError(f"{server}: {problem or missing}")

    async def join_group(self, server: str, address: GroupAddress, first_rank: int) -> None:
        await self._call(server, "dovetail_join_group", (asdict(address), first_rank))

    async def begin_update(self, server: str, expected: ExpectedWeights) -> None:
        await self._call(server, "dovetail_begin_update", (asdict(expected),))

    async def receive(self, server: str) -> str | None:
        return _first_problem(await self._call(server, "dovetail_receive"))

    async def finish_update(self, server: str) -> str | None:
        return _first_problem(await self._call(server, "dovetail_finish_update"))

    async def set_version(self, server: str, version: int) -> None:
        await self._call(server, "dovetail_set_version", (version,))

    async def checksums(self, server: str, shapes: Mapping[str, tuple[int, ...]], dtype: str | None) -> dict[str, str]:
        return (await self._call(server, "dovetail_checksums", (list(shapes), dtype)))[0]

    async def _logprobs(self, server: str, given: LogprobsMode) -> LogprobsMode:
        """Under the temperature, before filtering, where that is wanted and the server's sampler can be extended."""
        if given == "temperature" or self._wanted_logprobs != "temperature":
            return given
        extended = await self._call(server, "dovetail_use_temperature_logprobs")
        return "temperature" if all(str(answer) == "True" for answer in extended) else given

    async def _call(self, server: str, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """A method of every worker. The route turns results that are no dict, list or None into text."""
        answer = await self.client.post(
            f"{server}/collective_rpc", {"method": method, "args": list(args)}, timeout_s=_LONG_S
        )
        with understood(server, answer):
            return list(answer["results"])


def part_of(server: str, choice: dict[str, Any], sample: RemoteSample) -> Part:
    """Of one choice of an OpenAI completion that carries token ids."""
    token_ids = [int(token) for token in choice["token_ids"]]
    scores = [float(value) for value in choice["logprobs"]["token_logprobs"]]
    reason = finish_reason(server, choice["finish_reason"])
    if len(scores) != len(token_ids):
        raise ServerError(f"{server} answered {len(token_ids)} tokens and {len(scores)} log-probs.", url=server)
    if reason == "length" and len(token_ids) < sample.remaining:
        raise ServerError(
            f"{server} stopped at {len(token_ids)} of {sample.remaining} tokens: it has a limit of its own. Start it "
            "with --generation-config vllm, which leaves the limits to the requests.",
            url=server,
        )
    return Part(token_ids, scores, reason)


def _common_version(workers: list[Any]) -> int | None:
    versions = {worker["weight_version"] for worker in workers}
    return versions.pop() if len(versions) == 1 else None


def _first_problem(answers: list[Any]) -> str | None:
    return next((str(answer) for answer in answers if answer is not None), None)
