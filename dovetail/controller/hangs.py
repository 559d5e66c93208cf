"""Which rank holds up the others? Reads stacks and error texts; waits for nothing, stops nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Innermost frames that are looked at: a rank that waits in a collective is in torch's code for it, right at the top.
_NUM_FRAMES = 8
_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_OUR_CALL = "dovetail/controller/host.py"
_COLLECTIVE = "torch/distributed/"
_TIMEOUT_TEXTS = ("Timed out waiting", "timed out after", "collective operation timeout", "wait timeout after")


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
