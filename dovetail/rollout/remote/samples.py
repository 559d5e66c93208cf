"""One response on its way through servers: what it has so far, and what is still to be generated. Sends nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from dovetail.rollout.base import FinishReason, GenerationRequest, derive_seed
from dovetail.rollout.request_rules import base_seed, stop_tokens
from dovetail.rollout.response import GrowingResponse


@dataclass(frozen=True, slots=True)
class Part:
    """What one call to a server wrote. `weight_version` is that of `ServerInfo`, where `Dialect.parts_have_version`."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_version: int | None = None


@dataclass(slots=True, eq=False)
class RemoteSample(GrowingResponse):
    """What servers have generated of one response, part by part.

    `aborting` asks for its end with what it has; `call` is the call that is writing now, `call_id` its name on
    `server`; `dropped` says that its connection was closed before it answered.
    """

    base_seed: int
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    aborting: bool = False
    dropped: bool = False
    call: asyncio.Task[Part] | None = None
    call_id: str = ""
    server: str = ""

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - len(self.versions)

    @property
    def seed(self) -> int:
        """Of the response, for servers whose random numbers depend on seed and position."""
        return derive_seed(self.base_seed, self.index)

    @property
    def call_seed(self) -> int:
        """Of the next call, for servers that start a generator with it: neither a continued response nor the next turn
        of a conversation may repeat the random numbers of what is before it in the sequence."""
        return derive_seed(self.base_seed, self.index, len(self.sequence))

    def take(self, part: Part, version: int) -> None:
        """Add a part. One that was aborted leaves the response open, unless it is complete or aborting."""
        reason: FinishReason | None = None
        if part.finish_reason != "abort":
            reason = part.finish_reason
        elif part.token_ids and part.token_ids[-1] in self.stop_token_ids:
            reason = "stop"
        elif self.remaining <= len(part.token_ids):
            reason = "length"
        elif self.aborting:
            reason = "abort"
        self.extend(part.token_ids, part.log_probs, version, reason)


def samples_of(request: GenerationRequest, *, eos_ids: Collection[int], max_model_len: int) -> list[RemoteSample]:
    """The n samples. Stop tokens are the request's and, unless ignored, the model's; none is left to the server."""
    sampling = request.sampling
    stop, seed = stop_tokens(sampling, eos_ids), base_seed(sampling)
    room = max_model_len - len(request.prompt_token_ids)
    indices = range(request.sample_index, request.sample_index + sampling.n)
    return [RemoteSample(request, index, seed, min(sampling.max_new_tokens, room), stop) for index in indices]
