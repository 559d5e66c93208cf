"""`DrawLedger`: what became of every draw (a sampled prompt with its group of responses). Appends to `draws.jsonl`.

Each draw is started, finished, and then ends once: trained at a step, or dropped for a reason. Until then it is open.

Lines wait in memory until `flush(step)`. Flush with `durable` before the checkpoint of that step: the checkpoint then
covers every line up to its step, and a resume removes all later lines (`RunFolder.resume`), because those draws are
drawn again under the same numbers. So a kill or a power cut at any moment leaves a ledger that the next start makes
right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.observability.disk import flush_to_disk
from dovetail.observability.run_folder import DRAWS, append_json_lines, read_json_lines

VersionRuns = Sequence[Sequence[int]]
"""`[[version, count], ...]`: how many sampled tokens of a group were generated under which weights."""


class DrawLedger:
    """One writer: the driver."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / DRAWS
        self._waiting: list[dict[str, Any]] = []

    def resume(self, step: int, num_drawn: int, *, was_synchronous: bool) -> None:
        """A checkpoint of another folder, or of a synchronous run, brings draws that this ledger has not seen. What it
        has of later steps does not count: `RunFolder.resume` removes it."""
        if num_drawn and (was_synchronous or not any(line["step"] <= step for line in read_json_lines(self._file))):
            self._note("resumed", step=step, num_drawn=num_drawn)
            self.flush(step)

    def started(self, draws: Iterable[int], version: int) -> None:
        """These draws were given to engines that hold the weights of `version`."""
        self._note("started", draws=list(draws), version=version)

    def finished(self, draw: int, versions: VersionRuns, outcome: str = "finished", restarted: int = 0) -> None:
        """All responses of a draw are there; `versions` counts the sampled tokens of the group.

        `restarted`: trajectories of agents that a resume could not continue, and so began again.
        """
        facts = {"restarted": restarted} if restarted else {}
        self._note("finished", draw=draw, versions=[list(run) for run in versions], outcome=outcome, **facts)

    def trained(self, draws: Iterable[int], step: int, **bound: int) -> None:
        """`bound` and `masks_stale` of `violations`, where given: they may change when a run is resumed."""
        self._note("trained", step=step, draws=list(draws), **bound)

    def dropped(self, draw: int, reason: str, step: int) -> None:
        self._note("dropped", step=step, draw=draw, reason=reason)

    def flush(self, step: int, *, durable: bool = False) -> None:
        """Write the lines that wait, in one write. Those that have no step yet belong to `step`.

        `durable`: these lines and all earlier ones survive a power cut.
        """
        waiting, self._waiting = self._waiting, []
        if waiting:
            append_json_lines(self._file, [{"step": step, **line} for line in waiting])
        if durable and self._file.exists():
            flush_to_disk(self._file)
            flush_to_disk(self._file.parent)

    def _note(self, event: str, **facts: Any) -> None:
        self._waiting.append({"event": event, **facts})


@dataclass
class DrawRecord:
    """Everything the ledger says about one draw."""

    draw: int
    starts: list[int] = field(default_factory=list)
    """Version of the weights at each start."""
    finishes: list[VersionRuns] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    """Steps."""
    bound: int | None = None
    """In force when it was trained, with `masks_stale`; None: older ledgers do not say."""
    masks_stale: bool = False
    dropped: list[str] = field(default_factory=list)
    """Reasons."""
    restarted: int = 0
    """Trajectories that began again after a resume."""

    @property
    def state(self) -> str:
        """`trained`, `dropped` or `open`."""
        return "trained" if self.trained else "dropped" if self.dropped else "open"

    def staleness(self, masked_beyond: int | None = None) -> int | None:
        """Updates between the weights of its oldest sampled token and the step that trained on it; None: no tokens.

        Tokens older than `masked_beyond` steps, or than its own bound, were masked and do not count.
        """
        if not self.trained or not self.finishes:
            return None
        if self.bound is not None:
            masked_beyond = self.bound if self.masks_stale else None
        ages = [self.trained[0] - 1 - version for version, count in self.finishes[-1] if count]
        return max((age for age in ages if masked_beyond is None or age <= masked_beyond), default=None)


@dataclass
class Ledger:
    """The draws of a run by number."""

    draws: dict[int, DrawRecord] = field(default_factory=dict)
    elsewhere: list[range] = field(default_factory=list)
    """Draws that were started in another folder, from which the run was resumed, or in synchronous steps."""
    num_drawn_at: dict[int, int] = field(default_factory=dict)
    """Number of draws that had been started at the end of each step that has lines."""

    def is_elsewhere(self, draw: int) -> bool:
        return any(draw in draws for draws in self.elsewhere)

    def counts(self) -> Counter[str]:
        """Draws by how they ended: `trained`, `open`, `dropped (reason)`."""
        return Counter(
            f"dropped ({record.dropped[0]})" if record.state == "dropped" else record.state
            for record in self.draws.values()
        )


def read_ledger(folder: Path) -> Ledger | None:
    """The state of every draw; None where the run has no ledger."""
    file = folder / DRAWS
    if not file.exists():
        return None
    ledger, num_drawn = Ledger(), 0
    for line in read_json_lines(file):
        event = line["event"]
        if event == "resumed":
            ledger.elsewhere.append(range(num_drawn, line["num_drawn"]))
            num_drawn = line["num_drawn"]
        for draw in line["draws"] if "draws" in line else [line["draw"]] if "draw" in line else []:
            record = ledger.draws.setdefault(draw, DrawRecord(draw))
            if event == "started":
                num_drawn = max(num_drawn, draw + 1)
                record.starts.append(line["version"])
            elif event == "finished":
                record.finishes.append(line["versions"])
                record.restarted += line.get("restarted", 0)
            elif event == "trained":
                record.trained.append(line["step"])
                record.bound, record.masks_stale = line.get("bound"), line.get("masks_stale", False)
            elif event == "dropped":
                record.dropped.append(line["reason"])
        ledger.num_drawn_at[line["step"]] = num_drawn
    return ledger


def violations(ledger: Ledger, *, bound: int | None, masks_stale: bool = False) -> Iterator[str]:
    """One sentence for each way in which the ledger breaks its promises; none where all is well.

    `bound`: most steps between the oldest token of a group and its training; None: not limited. With `masks_stale`,
    tokens beyond it were masked, so a group only needs one token within it. What a draw says itself goes first.
    """
    started = {draw for draw, record in ledger.draws.items() if record.starts}
    last = max(started, default=-1)
    for draw in range(last):
        if draw not in started and not ledger.is_elsewhere(draw):
            yield f"draw {draw} was skipped: draws up to {last} were started, and it was not."
    for draw in sorted(ledger.draws):
        yield from _broken_promises(ledger.draws[draw], ledger.is_elsewhere(draw), bound, masks_stale)


def _broken_promises(record: DrawRecord, is_elsewhere: bool, bound: int | None, masks_stale: bool) -> Iterator[str]:
    name = f"draw {record.draw}"
    ends = [f"trained at step {step}" for step in record.trained] + [f"dropped ({why})" for why in record.dropped]
    if len(ends) > 1:
        yield f"{name} ended {len(ends)} times: {', '.join(ends)}."
    # What was in flight in another run folder started there, and may have finished there.
    if is_elsewhere:
        return
    if (record.finishes or ends) and not record.starts:
        yield f"{name} was {ends[0] if ends else 'finished'} and never started."
    if record.trained and not record.finishes:
        yield f"{name} was trained at step {record.trained[0]} and never finished."
    if len(record.finishes) > 1:
        yield f"{name} finished {len(record.finishes)} times."
    if not record.trained or not record.finishes:
        return
    newest = max((version for version, count in record.finishes[-1] if count), default=0)
    if newest >= record.trained[0]:
        yield (
            f"{name} was trained at step {record.trained[0]} and has tokens of version {newest}: weights that did not "
            "exist before that step."
        )
    if record.bound is not None:
        bound, masks_stale = record.bound, record.masks_stale
    age = record.staleness(bound if masks_stale else None)
    if masks_stale and age is None:
        yield f"{name} was trained at step {record.trained[0]} and all its tokens are older than {bound} steps."
    elif bound is not None and age is not None and age > bound:
        yield f"{name} was trained at step {record.trained[0]} with tokens {age} steps old; the bound is {bound}."
