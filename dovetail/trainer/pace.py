"""How far generation may run ahead of training, and which finished groups a step trains on. Pure; knows no engine.

Draws (prompts with their group of responses) start in chunks of one generation batch; a step without dynamic sampling
trains on one chunk's worth of groups. While the engines hold the weights left by version v, the chunks for the next
`1 + max_staleness` batches may start; so, taken in order, no group is more than `max_staleness` updates old. With
dynamic sampling a batch takes more or less than one chunk, and how many is only expected.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Order = Literal["finish", "draw"]
OnStale = Literal["wait", "drop", "mask"]


@dataclass
class Pace:
    """Counts chunks since the run began or was resumed. `num_taken_at_update` is how many had been taken when the
    engines got their weights."""

    max_staleness: int
    num_taken: int = 0
    num_taken_at_update: int = 0

    def may_start(self, num_open: int, batches_left: int, *, num_filled: float | None = None) -> bool:
        """Whether the next chunk may start, beside `num_open` chunks' worth of groups that no step has taken yet and
        none has dropped. `batches_left` is how many batches the run still trains on after that update, so that nothing
        is generated that no step would use.

        `num_filled`, with dynamic sampling: how many batches since that update are trained on, or are expected to be
        filled by groups that are kept, taken or open. Where nothing may be stale, a chunk has to be needed for sure.
        """
        ahead = min(1 + self.max_staleness, batches_left)
        is_in_time = self.num_taken + num_open < self.num_taken_at_update + ahead
        if num_filled is None:
            return is_in_time
        return num_filled < ahead and (is_in_time or self.max_staleness > 0)


class Draw(Protocol):
    """What choosing reads of a draw."""

    @property
    def number(self) -> int: ...

    @property
    def version(self) -> int:
        """Of its oldest token; of a running draw, of the weights it started with."""
        ...

    @property
    def newest(self) -> int:
        """Of its newest token, once it is finished."""
        ...


@dataclass(frozen=True)
class Choice:
    """The draws of a step, or what it waits for. `must_finish` are running draws that it cannot do without."""

    chosen: Sequence[int] | None
    must_finish: Sequence[int] = ()
    too_old: Sequence[int] = ()
    """To be dropped, finished or not."""


def choose(
    ready: Collection[Draw],
    running: Collection[Draw],
    *,
    count: int,
    step: int,
    max_staleness: int,
    order: Order,
    on_stale: OnStale,
    is_filtered: bool = False,
) -> Choice:
    """The `count` draws that step `step` trains on, by number; `chosen` is None while some have to be waited for.

    A draw of version v is (step - 1) - v updates old. No more than `count` draws are due in a step: no more were
    started under those weights (`Pace`), and older ones are not put off for newer ones too often (`_needed_now`).
    With dynamic sampling (`is_filtered`) a step chooses as often as it has to, so it waits only for what is due in it.
    """
    if order == "draw":
        wanted = sorted(draw.number for draw in (*ready, *running))[:count]
        unfinished = sorted({draw.number for draw in running} & set(wanted))
        complete = not unfinished and len(wanted) == count
        return Choice(wanted if complete else None, must_finish=unfinished)
    oldest = step - 1 - max_staleness
    dropped: list[int] = []
    if on_stale == "drop":
        dropped = sorted(draw.number for draw in (*ready, *running) if draw.version < oldest)
        ready = [draw for draw in ready if draw.version >= oldest]
    elif on_stale == "mask":  # nothing of them would be left
        dropped = sorted(draw.number for draw in ready if draw.newest < oldest)
        ready = [draw for draw in ready if draw.newest >= oldest]
    chosen = sorted(ready, key=lambda draw: (draw.version, draw.number))[:count]
    must_finish = []
    if on_stale == "wait":
        last = step if is_filtered else step + max_staleness
        must_finish = _needed_now(
            [*ready, *running], chosen, running, count=count, steps=range(step, last + 1), bound=max_staleness
        )
    if must_finish or len(chosen) < count:
        return Choice(None, must_finish=must_finish, too_old=dropped)
    return Choice(sorted(draw.number for draw in chosen), too_old=dropped)


def _needed_now(
    open_draws: Collection[Draw],
    chosen: Collection[Draw],
    running: Collection[Draw],
    *,
    count: int,
    steps: range,
    bound: int,
) -> list[int]:
    """Running draws without which one of these steps, of which the first one chooses, would have more draws at the
    bound than it can take.

    A draw of version v must be trained by step v + 1 + bound. The steps from the first to `last` take `count` each; of
    the draws that are due by then, all that the later steps cannot take have to be in the first.
    """
    # No draw becomes due in other steps, and a bound that is as good as none has millions of them.
    for last in sorted({max(steps.start, draw.version + 1 + bound) for draw in open_draws}):
        if last not in steps:
            break
        oldest = last - 1 - bound
        due = sum(draw.version <= oldest for draw in open_draws)
        missing = due - sum(draw.version <= oldest for draw in chosen) - (last - steps.start) * count
        if missing > 0:
            return sorted(draw.number for draw in running if draw.version <= oldest)[:missing]
    return []
