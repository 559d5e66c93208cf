"""verl's sharding managers: `with manager:` gives the engine the trainer's weights and puts it to sleep after.

For scripts that import them. A run uses `workers.hybrid_engine`, which also offloads, verifies and restarts.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch


class FSDPVLLMShardingManager:
    """`source.named_weights()` streams to `engine.update_weights` on entry; the engine sleeps on exit.

    A rank without an engine passes `engine=None`: it takes part in gathering and drops what it gets. Random numbers
    drawn inside do not change what is trained.
    """

    def __init__(self, source: Any, engine: Any | None, *, version: int = 0) -> None:
        self._source = source
        self._engine = engine
        self.version = version

    def weights_changed(self) -> None:
        """The trainer took a step: the next entry sends its weights under a new version."""
        self.version += 1

    def __enter__(self) -> Self:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        self._random_state = torch.random.fork_rng(devices)
        self._random_state.__enter__()
        if self._engine is None:
            for _ in self._source.named_weights():  # gathering is collective: every rank takes every tensor
                pass
            return self
        # Weights first: on a shared device the KV cache takes what the gathered tensors have left.
        self._engine.wake(["weights"])
        self._engine.update_weights(self._source.named_weights(), self.version)
        self._engine.wake(["kv_cache"])
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._engine is not None:
            self._engine.sleep(["weights", "kv_cache"])
        self._random_state.__exit__(exc_type, exc, traceback)


MegatronVLLMShardingManager = FSDPSGLangShardingManager = FSDPVLLMShardingManager
