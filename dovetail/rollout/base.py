"""What every rollout engine takes and gives back. Token ids only: no text, no tokenizer, no rewards.

Log-probs mean the same in every engine. `log_probs[i]` is the log-probability of `token_ids[i]`

- under the sampling temperature, and under temperature 1 for greedy decoding (temperature 0);
- over the whole vocabulary, before top-k, top-p and min-p filtering;

unless `SamplingParams.logprobs` asks for `"processed"` (filtered and renormalised: the distribution the token was
really sampled from) or `"raw"` (temperature 1, unfiltered). The first is what a trainer recomputes from its own logits.
"""

from __future__ import annotations

import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeAlias, TypedDict, Unpack

import numpy as np
import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.models.errors import ModelError
from dovetail.rollout.stream import EngineStream, FailedRequest
from dovetail.weight_sync import GroupAddress, LoraAdapter

logger = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "abort", "running"]
"""`running` is for what `partial` shows of a response that is not finished."""
LogprobsMode = Literal["temperature", "processed", "raw"]
MemoryTag = Literal["weights", "kv_cache"]

ALL_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")

CLOSED = "the engine is closed; build a new one."
RUNNING = "requests are running; finish, abort or pause them before sleep."
NO_WEIGHTS = -1
"""`weight_version` of an engine that dropped its weights in its sleep."""
STALL_S = 400.0
"""An engine or server that has requests, is not paused and generates no token for this long hangs. Shorter than the
driver's shortest limit of a call (`HUNG_LEAST_S`), so that it is named, and a new or another one can take over."""
DROPPED_BY_SLEEP = "the weights were dropped by sleep and not sent again"


class EngineError(RuntimeError):
    """The engine cannot do this now: it is closed, asleep, or holds no usable weights."""


class NotFiniteError(EngineError, ModelError):
    """The weights, or what they compute, are NaN or infinite. A `ModelError` is shown without a traceback."""


class EngineDiedError(EngineError):
    """The engine's process is gone; what it was generating is lost. Only a new one helps."""

    def __init__(self, message: str, finished: Mapping[str, list[GenerationResult]] | None = None) -> None:
        super().__init__(message)
        self.finished: dict[str, list[GenerationResult]] = dict(finished or {})
        """Requests of the same call that were complete before, by their id."""


class WeightUpdateError(ValueError):
    """A weight update does not fit the engine's model. The message names the tensors."""


class UnsupportedPromptError(ValueError):
    """The prompt holds something this engine cannot read, such as images in a text engine."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Filters apply in this order: temperature, top-k, top-p on what is left, min-p.

    `seed` fixes the random numbers of the request: token number p of sample i depends on (seed, i, p) and the
    distribution only, never on what else is in the batch. Without a seed the engine draws a fresh one.
    `ignore_eos` ignores the model's end-of-sequence tokens; `stop_token_ids` always stop. The stop token is kept.
    `keep_experts` returns the experts of a mixture that each token was sent to, of an engine that is built for it.
    `keep_mask` returns what the filters left to choose from, at most `top_k` tokens: of tokens that tie with the last
    one, as many as fit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: LogprobsMode = "temperature"
    keep_mask: bool = False
    keep_experts: bool = False

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, "temperature", self.temperature, "must be 0 (greedy) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "must lie in (0, 1]; 1 turns it off")
        _require(self.top_k >= -1, "top_k", self.top_k, "must be positive; -1 or 0 turns it off")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "must lie in [0, 1]; 0 turns it off")
        _require(self.n >= 1, "n", self.n, "must be at least 1")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "must be at least 1")
        _require(
            self.logprobs in ("temperature", "processed", "raw"),
            "logprobs",
            self.logprobs,
            "must be 'temperature', 'processed' or 'raw'",
        )
        if self.keep_mask:
            _require(not self.greedy, "temperature", self.temperature, "must be more than 0 with keep_mask")
            _require(self.top_k > 0, "top_k", self.top_k, "must be positive with keep_mask: it bounds the mask")
            _require(self.logprobs == "processed", "logprobs", self.logprobs, "must be 'processed' with keep_mask")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether any of top-k, top-p, min-p takes tokens out of a sampled distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    multi_modal: Mapping[str, Any] | None = None
    """What the prompt holds beside text, in the form that the engine takes: docs/rollout-design.md, Images."""
    sample_index: int = 0
    """Number of the first sample. A sample that is continued alone, with its tokens as part of the prompt, keeps its
    number and its seed, and so the random numbers it would have drawn."""
    session: str | None = None
    """Requests of one session, such as the turns of a conversation, share a prefix cache where the engine has one."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One response. The three lists have one entry per token; `sample_index` tells the n samples of a request apart."""

    request_id: str
    sample_index: int
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_versions: list[int]
    num_prompt_tokens: int | None = None
    """The prompt as the engine read it, where it widens the placeholders of images itself."""
    sampling_mask: np.ndarray | None = field(default=None, compare=False)
    """What each token was chosen from (`protocol.sampling_mask`), where the request asked for it."""
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    """Of the prompt and the response but its last token (`protocol.routed_experts`), where the request asked for it and
    the response has finished."""


Deliver: TypeAlias = Callable[[GenerationResult | FailedRequest], None]


class ModelArgs(TypedDict, total=False):
    """How the folder of a model is read: as the trainer reads it. Servers that run already have their own."""

    trust_remote_code: bool
    """Whether code that comes with the model may run."""
    override_config: Mapping[str, Any] | None
    """Fields that the trainer changed in the model's config."""
    external_lib: str | None
    """A module that is imported before the model's config is read."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    ok: bool
    reason: str
    weight_version: int
    num_running: int
    num_waiting: int
    paused: bool
    asleep: frozenset[MemoryTag]
    kv_cache_bytes: int


class RolloutEngine(ABC):
    """Generates token ids from token ids.

    Requests come and go through streams (`open_stream`); `generate` is a stream that waits for all of its requests.
    Any number of threads may use an engine. Control calls (weights, abort, pause, sleep) take effect between two
    tokens, and have taken effect when they return.
    """

    name: ClassVar[str]
    on_trainer_devices: ClassVar[bool] = True
    """Whether its memory is the trainer's to want back. Engines elsewhere stay awake while the trainer works."""
    reload_weights: Callable[[Any], None] | None = None
    """Set by the owner of the weights: called with an engine that was restarted, to bring it up to date."""
    num_restarts: int = 0
    """How often the engine has died and been started again."""
    restarts_left: int = 0
    """How often it may be. An engine in the trainer's process ends with it."""
    _version: int = 0
    _staged: tuple[int, Mapping[str, torch.Tensor]] | None = None
    _closed: bool = False
    _asleep: frozenset[MemoryTag] = frozenset()
    _partial_update: str = ""
    """Why the weights cannot be used; empty when they can."""

    @property
    def num_weight_ranks(self) -> int:
        """Ranks that processes of the engine take in a trainer's weight group (`join_weight_group`); 0 for an engine
        that leaves it to its owner to receive, and to pass on with `update_weights`."""
        return 0

    @classmethod
    @abstractmethod
    def from_config(
        cls, config: RolloutConfig, folder: str, *, device: torch.device, shared: Any = None, **model: Unpack[ModelArgs]
    ) -> RolloutEngine:
        """The engine that the section `rollout` describes, for the model in `folder`.

        `shared` is the trainer's own module when its weights may be read in place; only the embedded engine can.
        """

    @property
    def weight_version(self) -> int:
        """Version given with the last weight update; 0 for the weights the engine started with."""
        return self._version

    def open_stream(self) -> EngineStream:
        """Requests in, results as they finish. Streams share the engine; each gets the results of its own requests."""
        return EngineStream(self)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Finish every request. Results keep the order of the requests, the n samples of one request side by side."""
        place = {request.request_id: number for number, request in enumerate(requests)}

        def in_order(results: Iterable[GenerationResult]) -> list[GenerationResult]:
            return sorted(results, key=lambda result: (place[result.request_id], result.sample_index))

        with self.open_stream() as stream:
            stream.submit(*requests)
            try:
                return in_order(stream.drain())
            except EngineDiedError as error:
                finished: dict[str, list[GenerationResult]] = {}
                for result in in_order(stream.take_finished()):
                    finished.setdefault(result.request_id, []).append(result)
                num_samples = {request.request_id: request.sampling.n for request in requests}
                complete = {name: own for name, own in finished.items() if len(own) == num_samples[name]}
                raise EngineDiedError(str(error), complete) from error

    def enqueue(self, requests: Sequence[GenerationRequest], deliver: Deliver) -> None:
        """Add requests to the running batch; they join it at the next step. For `EngineStream`, which users call.

        All requests are checked before any is added. `deliver` is called once for each sample when it has finished, or
        once for a request that cannot be finished while others go on, from whatever thread; it must return at once and
        must not call the engine.
        """
        raise EngineError(f"the {self.name} engine takes closed batches only; use generate.")

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> None:
        """Return when `done()`, or after `timeout` seconds. An engine in this process is stepped here."""
        raise EngineError(f"the {self.name} engine takes closed batches only; use generate.")

    def partial(self, request_ids: Collection[str] | None = None) -> list[GenerationResult]:
        """What these requests (all when None) have generated so far, with finish reason `running`; they go on."""
        raise EngineError(f"the {self.name} engine takes closed batches only; use generate.")

    def num_tokens(self) -> int:
        """A count that changes with every token of a running request, and when one ends: while it stays the same, the
        engine makes no progress."""
        return sum(len(result.token_ids) for result in self.partial())

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> None:
        """Take new weights under their Hugging Face names and forget every cache computed with the old ones.

        Raises WeightUpdateError naming each tensor the engine does not have, has with another shape, or was not given.
        Requests that are running go on under the new weights; their tokens carry the version that wrote them.
        `None` says the weights have already changed in place (engines that share the trainer's memory only).
        """

    def _sent(self, weights: Iterable[tuple[str, torch.Tensor]] | None) -> Iterable[tuple[str, torch.Tensor]]:
        """What an engine with weights of its own needs from `update_weights`."""
        if weights is None:
            raise ValueError(
                "update_weights(None) is for engines that share the trainer's memory; "
                f"this {self.name} engine has its own: send them."
            )
        return weights

    def stage_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Receive new weights while generation goes on with the old ones; `commit_weights` swaps them in.

        Here: into host memory, in full. Weights that were staged before and not committed are replaced.
        """
        self._staged = version, {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}

    def commit_weights(self, version: int) -> float:
        """Change to the staged weights between two tokens; returns the seconds during which nothing was generated."""
        weights = self._take_staged(version)
        start = time.perf_counter()
        self.update_weights(weights.items(), version)
        return time.perf_counter() - start

    def _take_staged(self, version: int) -> Mapping[str, torch.Tensor]:
        if self._staged is None or self._staged[0] != version:
            staged = "no weights are staged" if self._staged is None else f"version {self._staged[0]} is staged"
            raise EngineError(f"commit_weights({version}): {staged}; call stage_weights first.")
        weights, self._staged = self._staged[1], None
        return weights

    def update_adapter(self, adapter: LoraAdapter, version: int) -> None:
        """Take a new LoRA adapter over base weights that stay, and forget every cache computed with the old one."""
        raise EngineError(f"the {self.name} engine applies no adapters; send merged weights with update_weights.")

    def join_weight_group(self, address: GroupAddress, first_rank: int = 1) -> None:
        """Join a `WeightSender`'s group, on ranks from `first_rank` on. Blocks until the whole group is there."""
        raise EngineError(f"the {self.name} engine joins no group; receive here and use update_weights.")

    def receive_weights(self, version: int) -> None:
        """Take the update that the sender of the group is sending, as `update_weights` takes its argument."""
        raise EngineError(f"the {self.name} engine is in no group; receive here and use update_weights.")

    def weight_checksums(self, names: Sequence[str], dtype: torch.dtype | None = None) -> dict[str, str]:
        """`dovetail.weight_sync.tensor_checksum` of the weights the engine computes with, in `dtype` when given.

        Of those of `names` that it can read back: an engine that holds parts of weights, or is elsewhere, gives none.
        """
        return {}

    @abstractmethod
    def sleep(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        """Give back the memory of weights, KV cache or both. Running requests must be finished, aborted or paused."""

    @abstractmethod
    def wake(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        """Take the memory back. Weights that were dropped must then be sent with `update_weights`."""

    @abstractmethod
    def abort(self, request_ids: Collection[str] | None = None) -> int:
        """End these requests (all when None) with what they have generated; return how many responses ended."""

    def end_session(self, session: str) -> None:  # noqa: B027 - most engines keep nothing
        """No request of this session follows; what the engine keeps for it may go."""

    @abstractmethod
    def pause(self) -> None:
        """Stop writing tokens; requests keep their place. Returns once no step is in flight."""

    @abstractmethod
    def continue_(self) -> None:
        """Go on after `pause`."""

    @abstractmethod
    def health(self) -> EngineHealth:
        """Whether the engine can generate, and what it is doing."""

    @abstractmethod
    def close(self) -> None:
        """Give back everything. Requests still running end as aborted. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def restart(self, error: EngineDiedError) -> None:
        """Start a dead engine again, without the weights that it was sent, where `restarts_left` allows it."""
        raise error

    def _take_restart(self, error: EngineDiedError) -> None:
        """Count a restart; raises the error where none is left."""
        if self.restarts_left <= 0:
            raise error
        self.restarts_left -= 1
        self.num_restarts += 1
        logger.warning("%s Starting it again; %d restarts are left.", error, self.restarts_left)

    @property
    def _needs_weights(self) -> bool:
        """Whether a new process would not load the weights that this engine has."""
        return False

    @property
    def _brings_weights_back(self) -> bool:
        """Whether this engine can be restarted without help: it may, and finds the weights it had."""
        return self.restarts_left > 0 and (not self._needs_weights or self.reload_weights is not None)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(CLOSED)

    def _check_usable(self) -> None:
        """Everything is awake, and the weights are complete."""
        self._check_open()
        if self._asleep:
            raise EngineError(f"the engine's {' and '.join(sorted(self._asleep))} are asleep; call wake() first.")
        if self._partial_update:
            raise EngineError(
                f"the engine has no usable weights: {self._partial_update}; send all with update_weights."
            )

    def _check_weights_awake(self, before: str = "update_weights") -> None:
        """While the weights sleep, an update would have nowhere to go."""
        if "weights" in self._asleep:
            raise EngineError(f"the engine's weights are asleep; call wake(['weights']) before {before}.")


def check_tags(tags: Collection[MemoryTag]) -> frozenset[MemoryTag]:
    """The tags; ValueError for one that does not exist."""
    unknown = sorted(set(tags) - set(ALL_TAGS))
    if unknown:
        raise ValueError(f"unknown memory tag {unknown[0]!r}; choose from {', '.join(ALL_TAGS)}.")
    return frozenset(tags)


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from, say, (run seed, step, prompt uid): equal parts give equal seeds on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"sampling parameter {name}={value!r} {rule}.")
