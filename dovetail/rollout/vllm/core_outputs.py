"""Tokens straight from vLLM's core, without an object of the user's kind for each of them.

vLLM makes a `RequestOutput`, a completion and a dictionary of log-probs for every token of every sequence: ten times
the host's work of writing the token down (docs/rollout.md). Its own `LLM.generate` is spared some of that until a
sequence ends, but then cannot say which weights wrote which token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class CoreOutputs:
    """Stands where an engine of vLLM has its output processor: `take` sees what every step wrote, in the core's words.

    The processor itself sees the outputs that end a request, to forget it; all of them where it keeps statistics.
    """

    def __init__(self, processor: Any, take: Callable[[Sequence[Any]], None], *, keeps_statistics: bool) -> None:
        self._processor = processor
        self._take = take
        self._keeps_statistics = keeps_statistics

    def process_outputs(self, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        self._take(outputs)
        if not self._keeps_statistics:
            outputs = [output for output in outputs if output.finish_reason is not None]
        return self._processor.process_outputs(outputs, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)
