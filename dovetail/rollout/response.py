"""A response that is being generated: tokens, log-probs and weight versions so far. Knows no engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from dovetail.protocol.sampling_mask import NOT_KEPT, make_mask
from dovetail.rollout.base import FinishReason, GenerationRequest, GenerationResult

S = TypeVar("S", bound="GrowingResponse")


def of_requests(samples: Iterable[S], request_ids: Collection[str] | None) -> list[S]:
    """The samples of these requests; None: of all."""
    return [sample for sample in samples if request_ids is None or sample.request.request_id in request_ids]


@dataclass(slots=True, eq=False)
class GrowingResponse:
    """Sample `index` of a request. `sequence` is the prompt and all that was generated; `log_probs` and `versions` have
    one entry per generated token, and so has `kept` where the request keeps its sampling mask."""

    request: GenerationRequest
    index: int
    sequence: list[int] = field(init=False)
    log_probs: list[float] = field(default_factory=list, init=False)
    versions: list[int] = field(default_factory=list, init=False)
    kept: list[np.ndarray] = field(default_factory=list, init=False)
    """The ids that each token was chosen from."""
    finish_reason: FinishReason | None = field(default=None, init=False)
    num_prompt_tokens: int | None = field(default=None, init=False)
    """Of `GenerationResult`."""
    routed_experts: np.ndarray | None = field(default=None, init=False)
    """Of `GenerationResult`."""

    def __post_init__(self) -> None:
        self.sequence = list(self.request.prompt_token_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """What was generated."""
        return self.sequence[self.num_prompt :]

    def extend(
        self,
        token_ids: list[int],
        log_probs: list[float],
        version: int,
        finish_reason: FinishReason | None = None,
        sets: np.ndarray | None = None,
    ) -> None:
        """Add tokens that were generated under `version`, the last of them with the reason why it is the last.

        `sets`: `[tokens, width]` what was kept for each, filled up with `NOT_KEPT`, where the request keeps its mask.
        """
        self.sequence += token_ids
        if self.request.sampling.keep_mask:
            assert sets is not None, "an engine returns what it kept, or refuses the request"
            self.kept += [ids[ids != NOT_KEPT] for ids in sets]
        self.log_probs += log_probs
        self.finish_reason = finish_reason or self.finish_reason
        self.versions += [version] * len(token_ids)  # last: `partial` counts these

    def partial(self) -> GenerationResult:
        """What there is so far. Another thread may be adding tokens: they are all there, with their end, or none is."""
        # In this order: a reason that is there has its tokens in `sequence`, and may not have them in `versions` yet.
        count, reason = len(self.versions), self.finish_reason
        has_all = count == len(self.sequence) - self.num_prompt
        return GenerationResult(
            request_id=self.request.request_id,
            sample_index=self.index,
            token_ids=self.sequence[self.num_prompt : self.num_prompt + count],
            log_probs=self.log_probs[:count],
            finish_reason=(reason if has_all else None) or "running",
            weight_versions=self.versions[:count],
            num_prompt_tokens=self.num_prompt_tokens,
            sampling_mask=make_mask(self.kept[:count]) if self.request.sampling.keep_mask else None,
            routed_experts=self.routed_experts,
        )

    def result(self) -> GenerationResult:
        assert self.finish_reason is not None, "a result is made of a finished sample"
        return self.partial()
