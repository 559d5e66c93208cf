"""Any server with OpenAI's `/v1/completions`. Its weights are its own: it can generate for a run, never follow one.

OpenAI's protocol takes token ids but gives text back. A server is usable if it also answers the ids of its tokens, as
`token_ids` (vLLM and others, asked with `return_token_ids`) or written as "token_id:17"; the first request shows it.
"""

from __future__ import annotations

from collections.abc import Collection

from dovetail.rollout.base import SamplingParams
from dovetail.rollout.remote.client import HttpClient, ServerError
from dovetail.rollout.remote.dialect import Dialect, ServerInfo, understood
from dovetail.rollout.remote.samples import Part, RemoteSample
from dovetail.rollout.remote.vllm_dialect import part_of

_NO_WEIGHTS = "a plain OpenAI-compatible server has no way to take weights; use rollout.name=vllm or sglang"
_MAX_SEED = 2**31 - 1  # what servers written in other languages can hold


class OpenAIDialect(Dialect):
    name = "openai"
    health_path = "/v1/models"
    can_abort = False

    def __init__(self, client: HttpClient, *, max_model_len: int) -> None:
        super().__init__(client)
        self._max_model_len = max_model_len
        self._models: dict[str, str] = {}

    async def info(self, server: str) -> ServerInfo:
        answer = await self.client.get(f"{server}/v1/models")
        with understood(server, answer):
            card = answer["data"][0]
            self._models[server] = str(card["id"])
            length = int(card.get("max_model_len") or self._max_model_len)
        return ServerInfo(self._models[server], length, "raw", takes_no_weights=_NO_WEIGHTS)

    def check_sampling(self, sampling: SamplingParams) -> None:
        named = {
            "top_k": sampling.top_k > 0,
            "min_p": sampling.min_p > 0,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": bool(sampling.stop_token_ids),
        }
        asked = [name for name, is_asked in named.items() if is_asked]
        if asked:
            raise ValueError(
                f"{' and '.join(asked)} cannot be asked of a plain OpenAI-compatible server: the protocol has no such "
                "field. Use rollout.name=vllm or sglang if the server is one, or leave it out."
            )

    async def abort(self, server: str, call_ids: Collection[str]) -> None:
        """The protocol has no such call."""

    async def pause(self, server: str) -> None:
        """Nor this one; no request is sent while the engine is paused."""

    async def resume(self, server: str) -> None:
        """Nor this one."""

    async def complete(self, server: str, sample: RemoteSample) -> Part:
        sampling = sample.request.sampling
        body = {
            "model": self._models[server],
            "prompt": sample.prompt,
            "max_tokens": sample.remaining,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sample.seed & _MAX_SEED,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        answer = await self.client.post(f"{server}/v1/completions", body, timeout_s=None)
        with understood(server, answer):
            choice = answer["choices"][0]
            tokens = (choice.get("logprobs") or {}).get("tokens") or []
            has_ids = choice.get("token_ids") is not None or any(str(token).startswith("token_id:") for token in tokens)
            if not has_ids or not choice.get("logprobs"):
                raise ServerError(
                    f"{server} answers text without token ids and log-probs, and a trainer needs both: text does not "
                    "say which tokens wrote it. Use a server that knows return_token_ids and logprobs (vLLM), or "
                    "rollout.name=sglang for an SGLang server.",
                    url=server,
                )
            return part_of(server, choice, sample)
