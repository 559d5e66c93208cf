"""What differs between servers: routes, fields, and what they can do. One `Dialect` per kind of server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dovetail.rollout.base import EngineError, FinishReason, LogprobsMode, MemoryTag
from dovetail.rollout.remote.client import HttpClient, ServerError
from dovetail.rollout.remote.samples import Part, RemoteSample
from dovetail.weight_sync import ExpectedWeights, GroupAddress

COUNT_TIMEOUT_S = 2.0
PAUSE_TIMEOUT_S = 60.0
"""A server that hangs must not hold an update for ever: who does not answer is taken out of it."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself.

    `logprobs`: what its log-probs mean. `takes_no_weights` says why, and is empty where it takes them.
    `weight_version` is None where it has had no update. `num_workers` receive in a broadcast. `shape` are sizes of its
    model. `deterministic`: seeds of requests fix what is sampled, by a sampler of SGLang's own.
    """

    max_model_len: int
    logprobs: LogprobsMode
    weight_version: int | None = None
    takes_no_weights: str = ""
    num_workers: int = 1
    kv_cache_bytes: int = 0
    shape: Mapping[str, Any] = field(default_factory=dict)
    deterministic: bool = False


class Dialect(ABC):
    """Calls to one server each, by its URL. An error of the server is a ServerError."""

    name: ClassVar[str]
    health_path: ClassVar[str] = "/health"
    shared: bool = True
    """Whether others than this process may call the servers, so that they must be paused for an update."""
    parts_have_version: ClassVar[bool] = False
    """Whether what a call wrote comes with the version of the weights that wrote it (`Part.weight_version`)."""

    def __init__(self, client: HttpClient) -> None:
        self.client = client

    @abstractmethod
    async def info(self, server: str) -> ServerInfo: ...

    async def weight_version(self, server: str) -> int | None:
        """As in `info`."""
        return (await self.info(server)).weight_version

    @abstractmethod
    async def complete(self, server: str, sample: RemoteSample) -> Part:
        """Write the rest of the sample in one call named `sample.call_id`. Harmless when repeated."""

    @abstractmethod
    async def num_tokens(self, server: str) -> int:
        """A number that changes with every step in which the server generates. Within `COUNT_TIMEOUT_S`: who watches
        it waits."""

    @abstractmethod
    async def abort(self, server: str, call_ids: Collection[str]) -> None:
        """Ask for the end of these calls; each then answers with what it has, and "abort"."""

    @abstractmethod
    async def pause(self, server: str) -> None:
        """As `abort` for every call, and begin none until `resume`."""

    @abstractmethod
    async def resume(self, server: str) -> None:
        """Go on after `pause`."""

    @abstractmethod
    async def forget_caches(self, server: str) -> None:
        """Drop everything computed with the weights of before. The server is paused."""

    @abstractmethod
    async def sleep(self, server: str, tags: Collection[MemoryTag]) -> None: ...

    @abstractmethod
    async def wake(self, server: str, tags: Collection[MemoryTag]) -> None: ...

    @abstractmethod
    async def load_from_disk(self, server: str, folder: Path, expected: ExpectedWeights) -> None:
        """Take the version in a folder that it sees. WeightUpdateError for a misfit."""

    @abstractmethod
    async def join_group(self, server: str, address: GroupAddress, first_rank: int) -> None:
        """Join a `WeightSender`'s group; returns when the group is complete."""

    @abstractmethod
    async def begin_update(self, server: str, expected: ExpectedWeights) -> None:
        """From here to `set_version` the weights are of no version."""

    @abstractmethod
    async def receive(self, server: str) -> str | None:
        """Take what the sender of the group sends; a misfit in words."""

    @abstractmethod
    async def finish_update(self, server: str) -> str | None:
        """The update is over; what is missing, in words."""

    @abstractmethod
    async def set_version(self, server: str, version: int) -> None: ...

    @abstractmethod
    async def checksums(self, server: str, shapes: Mapping[str, tuple[int, ...]], dtype: str | None) -> dict[str, str]:
        """Checksums of the weights in use, as far as they can be read back. `shapes` by name."""

    async def load_file(self, server: str, path: Path) -> None:
        """Take the tensors that `torch.save` wrote into this machine's shared memory."""
        raise EngineError(f"rollout.name={self.name}: this kind of server takes no weights from shared memory.")


def require_same_shape(server: str, theirs: Mapping[str, Any], ours: Mapping[str, Any], folder: str) -> None:
    different = [
        f"{name}={theirs[name]!r} there, {ours[name]!r} here"
        for name in ours
        if name in theirs and theirs[name] != ours[name]
    ]
    if different:
        raise EngineError(
            f"the server {server} has another model than {folder}: {'; '.join(different)}. Start it with this model, "
            "or take it out of rollout.server_urls."
        )


def finish_reason(server: str, reason: object) -> FinishReason:
    if reason in ("stop", "length", "abort"):
        return reason  # pyrefly: ignore[bad-return]
    raise ServerError(f"{server} ended a request with finish_reason={reason!r}; its log says why.", url=server)


@contextmanager
def understood(server: str, answer: Any) -> Iterator[None]:
    """Inside, a field that an answer does not have is an error that shows the answer."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, ServerError):
            raise
        shown = str(answer)[:400]
        raise ServerError(
            f"{server} answered in a form not known here ({type(error).__name__}: {error}): {shown}", url=server
        ) from error
