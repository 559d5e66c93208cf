"""When a call is hung, and which rank holds up the others. Reads stacks and error texts; waits for nothing.

Limits are learned from earlier calls of the same method: a call is slow when it takes three times as long as the
longest before it, and hung at ten times: long enough for responses that grow and for a machine that is shared, short
enough to end a deadlock the same hour. The first call of a method has nothing to compare with and gets `first_limit_s`.
`allowed_s` are times by method that a call may always take, and ten minutes more: those of deadlines inside it.
A call that is past its limit and still computes (`observability.progress`) goes on; it is hung once it has computed
nothing for `again_s`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_LIMIT_S = 7200.0
SLOW_TIMES, SLOW_LEAST_S = 3.0, 60.0
HUNG_TIMES, HUNG_LEAST_S = 10.0, 600.0
# Innermost frames that are looked at: a rank that waits in a collective is in torch's code for it, right at the top.
_NUM_FRAMES = 8
_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_OUR_CALL = "dovetail/controller/host.py"
_COLLECTIVE = "torch/distributed/"
_TIMEOUT_TEXTS = ("Timed out waiting", "timed out after", "collective operation timeout", "wait timeout after")


@dataclass(frozen=True)
class CallLimit:
    """Seconds after which a call is named as slow, and after which it is given up; ``why`` explains the second. One
    that has made progress is looked at again every ``again_s``."""

    slow_s: float
    hung_s: float
    why: str
    again_s: float


@dataclass(frozen=True)
class _Longest:
    seconds: float
    rows: int


class CallLimits:
    """One for each group of processes."""

    def __init__(self, first_limit_s: float = FIRST_LIMIT_S, *, allowed_s: Mapping[str, float] | None = None) -> None:
        self.first_limit_s = first_limit_s
        self._allowed_s = allowed_s or {}
        self._longest: dict[tuple[str, str], _Longest] = {}

    def record(self, role: str, method: str, seconds: float, rows: int = 0) -> None:
        """A call has finished."""
        known = self._longest.get((role, method))
        if known is None or seconds > known.seconds:
            self._longest[role, method] = _Longest(seconds, rows)

    def limit(self, role: str, method: str, rows: int = 0) -> CallLimit:
        """For a call on ``rows`` rows; more rows than the longest call had get more time."""
        known = self._longest.get((role, method))
        if known is None:
            slow, hung = min(SLOW_LEAST_S * 10, self.first_limit_s), self.first_limit_s
            why = f"no earlier call to compare with; trainer.worker_timeout_s={self.first_limit_s:.0f}"
        else:
            expected = known.seconds * max(1.0, rows / known.rows if known.rows else 1.0)
            slow = max(SLOW_LEAST_S, SLOW_TIMES * expected)
            hung = max(min(HUNG_LEAST_S, self.first_limit_s), HUNG_TIMES * expected)
            why = f"the longest call before took {known.seconds:.1f} s"
        allowed = self._allowed_s.get(method)
        if allowed and allowed + HUNG_LEAST_S > hung:
            hung, why = allowed + HUNG_LEAST_S, f"{why}, and what it waits for may take {allowed:.0f} s"
        return CallLimit(slow, hung, why, again_s=min(HUNG_LEAST_S, self.first_limit_s))


def not_finished(seconds: float, limit: CallLimit, computed: int) -> str:
    """Why a call is given up; ``computed`` is what it had counted until it stood still."""
    still = f", and computes nothing any more: for {limit.again_s:.0f} s" if computed else ""
    return f"Not finished after {seconds:.0f} s ({limit.why}){still}."


def find_hung_rank(stacks: Mapping[int, str]) -> int | None:
    """The one rank, or the first of several, that is not in a collective while another is; None: they look alike."""
    waits = {rank: waits_in_collective(text) for rank, text in stacks.items() if text}
    busy = [rank for rank in sorted(stacks) if not waits.get(rank, False)]
    return busy[0] if busy and len(busy) < len(stacks) else None


def waits_in_collective(stacks: str) -> bool:
    """Whether the thread that runs the group's call is in a collective, by the stacks that `faulthandler` wrote."""
    for thread in _THREAD.split(stacks):
        if _OUR_CALL in thread:
            frames = [line for line in thread.splitlines() if line.strip().startswith("File ")]
            return any(_COLLECTIVE in frame for frame in frames[:_NUM_FRAMES])
    return False


def is_collective_timeout(error: BaseException) -> bool:
    """Whether a rank failed because others did not come to a collective."""
    text = str(error)
    return any(known in text for known in _TIMEOUT_TEXTS)
