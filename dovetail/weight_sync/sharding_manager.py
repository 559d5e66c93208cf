"""The hybrid engine's switch: inside the context the device generates with the trainer's weights, outside it trains.

Works with any `WeightSource` and any `SleepingSink`; the names users know are here. Offloading of parameters and
optimizer is the caller's, who knows what it can afford.
"""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Any, Self

import torch

from dovetail.weight_sync.protocols import SleepingSink, WeightSource

logger = logging.getLogger(__name__)


class ShardingManager:
    """`with manager:` wakes the engine and gives it the source's weights; leaving puts the engine to sleep.

    A rank without an engine passes `engine=None`: it takes part in gathering and drops what it gets. Weights are sent
    after `weights_changed` and after every sleep, in which an engine may drop them. The two sides keep random states
    of their own, so that how much was generated never changes what is trained.
    """

    def __init__(
        self, source: WeightSource, engine: SleepingSink | None, *, sleep: bool = True, version: int = 0
    ) -> None:
        self._source = source
        self._engine = engine
        self._sleeps = sleep
        self._version = version
        self._stale = True
        self._inside = False
        self._generation_rng: dict[str, Any] | None = None
        self._training_rng: dict[str, Any] | None = None
        self.timing: dict[str, float] = {}

    @property
    def version(self) -> int:
        """Version of the weights that the engine has, or gets at the next entry."""
        return self._version

    def weights_changed(self, version: int | None = None) -> None:
        """The trainer took a step: the next entry sends the weights, under `version` (default: one more)."""
        self._version = self._version + 1 if version is None else version
        self._stale = True

    def __enter__(self) -> Self:
        if self._inside:
            raise RuntimeError("the engine is in rollout mode already; leave the context before entering it again.")
        start = time.perf_counter()
        self._training_rng = _random_state()
        # Weights first: on a shared device the KV cache takes what the gathered tensors have left.
        if self._engine is not None and self._sleeps:
            self._engine.wake(["weights"])
        if self._stale:
            self._send()
        if self._engine is not None and self._sleeps:
            self._engine.wake(["kv_cache"])
        if self._generation_rng is not None:
            _set_random_state(self._generation_rng)
        self._inside = True
        self.timing["weight_sync/enter_s"] = time.perf_counter() - start
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        start = time.perf_counter()
        self._inside = False
        if self._sleeps:
            self._stale = True  # on every rank, with an engine or not: sending is collective
            if self._engine is not None:
                self._engine.sleep(["weights", "kv_cache"])
        self._generation_rng = _random_state()
        if self._training_rng is not None:
            _set_random_state(self._training_rng)
        self.timing["weight_sync/exit_s"] = time.perf_counter() - start

    def _send(self) -> None:
        weights = self._source.named_weights()
        if self._engine is None:
            for _ in weights:  # gathering is collective: every rank takes every tensor
                pass
        else:
            self._engine.update_weights(weights, self._version)
        self._stale = False


class FSDPVLLMShardingManager(ShardingManager):
    """Weights of an FSDP or FSDP2 backend for a vLLM engine in the same process."""


class MegatronVLLMShardingManager(ShardingManager):
    """Weights of a Megatron backend for a vLLM engine in the same process."""


class FSDPSGLangShardingManager(ShardingManager):
    """Weights of an FSDP or FSDP2 backend for an SGLang engine in the same process."""


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
