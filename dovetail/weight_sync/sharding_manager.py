"""verl's sharding managers: `with manager:` gives the engine the trainer's weights and puts it to sleep after.

For scripts that import them. A run uses `workers.hybrid_engine`, which also offloads, verifies and restarts.
"""

from __future__ import annotations

from contextlib import ExitStack
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
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices))
            if self._engine is None:
                for _ in self._source.named_weights():  # gathering is collective: every rank takes every tensor
                    pass
            else:
                stack.callback(self._engine.sleep, ["weights", "kv_cache"])
                # Weights first: on a shared device the KV cache takes what the gathered tensors have left.
                self._engine.wake(["weights"])
                self._engine.update_weights(self._source.named_weights(), self.version)
                self._engine.wake(["kv_cache"])
            self._left = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._left.__exit__(*error)


MegatronVLLMShardingManager = FSDPSGLangShardingManager = FSDPVLLMShardingManager
