"""A response that is being generated: tokens, log-probs and weight versions so far. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.rollout.base import FinishReason, GenerationRequest, GenerationResult


@dataclass(slots=True, eq=False)
class GrowingResponse:
    """Sample `index` of a request. The three lists grow together, one entry per token."""

    request: GenerationRequest
    index: int
    token_ids: list[int] = field(default_factory=list, kw_only=True)
    log_probs: list[float] = field(default_factory=list, kw_only=True)
    versions: list[int] = field(default_factory=list, kw_only=True)
    finish_reason: FinishReason | None = field(default=None, kw_only=True)
    num_prompt_tokens: int | None = field(default=None, kw_only=True)

    def extend(self, token_ids: list[int], log_probs: list[float], version: int) -> None:
        """Add tokens that were generated under `version`."""
        self.token_ids += token_ids
        self.log_probs += log_probs
        self.versions += [version] * len(token_ids)

    def partial(self) -> GenerationResult:
        """What there is so far. Another thread may be adding a token: the lists are cut to one length."""
        count = len(self.versions)
        return GenerationResult(
            request_id=self.request.request_id,
            sample_index=self.index,
            token_ids=self.token_ids[:count],
            log_probs=self.log_probs[:count],
            finish_reason=self.finish_reason or "running",
            weight_versions=self.versions[:count],
            num_prompt_tokens=self.num_prompt_tokens,
        )

    def result(self) -> GenerationResult:
        assert self.finish_reason is not None, "a result is made of a finished sample"
        return self.partial()
