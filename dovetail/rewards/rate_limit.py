"""How many calls of a reward function may start: at once, per minute, and by tokens per minute. Starts nothing."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

_MINUTE = 60.0


@dataclass(frozen=True)
class RateLimits:
    """`None` is no limit. `estimated_tokens` is what one call counts for against `max_tpm`."""

    max_concurrent: int | None = None
    max_rpm: float | None = None
    max_tpm: float | None = None
    estimated_tokens: int = 2000

    def __post_init__(self) -> None:
        if self.max_tpm is not None and self.estimated_tokens > self.max_tpm:
            raise ValueError(
                f"reward_model.estimated_tokens_per_request={self.estimated_tokens} is more than reward_model.max_tpm="
                f"{self.max_tpm:g}: no call could ever start. Raise max_tpm or lower the estimate."
            )

    @property
    def calls_per_minute(self) -> int | None:
        """The tighter of the two limits, in calls; a limit below one call a minute is one call."""
        by_tokens = None if self.max_tpm is None else self.max_tpm // self.estimated_tokens
        limits = [limit for limit in (self.max_rpm, by_tokens) if limit is not None]
        return max(1, int(min(limits))) if limits else None


@dataclass
class RateLimiter:
    """Counts starts and ends. In any 60 seconds at most `calls_per_minute` calls start."""

    limits: RateLimits
    num_running: int = 0
    _starts: collections.deque[float] = field(default_factory=collections.deque)

    def wait(self, now: float) -> float | None:
        """Seconds until a call may start; 0 is now, None is not before another ends."""
        if self.limits.max_concurrent is not None and self.num_running >= self.limits.max_concurrent:
            return None
        allowed = self.limits.calls_per_minute
        while self._starts and self._starts[0] <= now - _MINUTE:
            self._starts.popleft()
        if allowed is None or len(self._starts) < allowed:
            return 0.0
        return self._starts[0] + _MINUTE - now

    def start(self, now: float) -> None:
        self.num_running += 1
        if self.limits.calls_per_minute is not None:
            self._starts.append(now)

    def end(self) -> None:
        self.num_running -= 1
