"""The samples that a vLLM engine is writing, by their id in it. Calls nothing of vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from dovetail.rollout.vllm.requests import Sample


class LiveSamples:
    def __init__(self) -> None:
        self._samples: dict[str, Sample] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, *samples: Sample) -> None:
        self._samples |= {sample.vllm_id: sample for sample in samples}

    def remove(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self._samples.pop(sample.vllm_id, None)

    def check_new(self, request_ids: Iterable[str]) -> None:
        """ValueError for an id that comes twice, or that a running request has."""
        running = {sample.request.request_id for sample in self._samples.values()}
        repeated = [name for name, count in Counter(request_ids).items() if count > 1 or name in running]
        if repeated:
            raise ValueError(f"request_id {repeated[0]!r} is in use; ids of running requests must be unique.")

    def get(self, vllm_id: str) -> Sample | None:
        return self._samples.get(vllm_id)

    def of(self, request_ids: Collection[str] | None) -> list[Sample]:
        """The samples of these requests; None: of all."""
        return [
            sample
            for sample in list(self._samples.values())  # other threads add and remove
            if request_ids is None or sample.request.request_id in request_ids
        ]

    def absorb(self, outputs: Iterable[Any], version: int) -> bool:
        """Take the core's outputs of one step, and let go of what is complete; whether anything is."""
        finished: list[Sample] = []
        for output in outputs:
            sample = self._samples.get(output.request_id)
            if sample is None:
                continue  # aborted while the step ran
            sample.absorb(output, version)
            if output.finish_reason is not None:
                sample.finish(str(output.finish_reason))
                finished.append(sample)
        self.remove(finished)
        return bool(finished)

    def num_tokens(self) -> dict[str, int]:
        """Tokens written so far by each request, all its samples together."""
        counts: dict[str, int] = {}
        for sample in self._samples.values():
            counts[sample.request.request_id] = counts.get(sample.request.request_id, 0) + len(sample.token_ids)
        return counts
