"""Responses of a run: pages of groups by filter, words and order, and search in all steps. Reads one index per step."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dovetail.dashboard.response_file import TOKEN_LISTS, Entry, ResponseFile, prompt_bytes, stamp_of
from dovetail.dashboard.run_files import DashboardError

Kind = Literal["rollouts", "validation"]
Filter = Literal["all", "wrong", "truncated", "no_signal", "failed"]
Order = Literal["recorded", "longest", "best", "worst", "gap"]

_SIGNAL = 1e-9
# Entries are about 300 bytes each: 60 MB at most, whatever the size of the run.
_MOST_ENTRIES = 200_000
_CHUNK = 8 * 1024 * 1024

_ORDERS: dict[str, Callable[[Entry], float]] = {
    "longest": lambda entry: -entry.length,
    "best": lambda entry: -(entry.score if entry.score is not None else float("-inf")),
    "worst": lambda entry: entry.score if entry.score is not None else float("inf"),
    "gap": lambda entry: -(entry.gap or 0.0),
}


@dataclass(frozen=True)
class Wish:
    """What a reader wants to see."""

    filter: Filter = "all"
    words: str = ""
    order: Order = "recorded"
    outcome: str = ""
    """Of an agent's trajectory; empty: any."""
    tool: str = ""
    """That a trajectory used; empty: any."""


class ResponseFolder:
    """`rollouts/` or `validation/` of a run. Indices of the files read last are kept, within a bound."""

    def __init__(self, path: Path, resolve: Callable[[Path], Path]) -> None:
        self._path = path
        self._resolve = resolve
        self._files: OrderedDict[int, ResponseFile] = OrderedDict()
        self._steps: list[int] = []
        self._steps_stamp = -1

    def steps(self) -> list[int]:
        """The steps that have responses, in order."""
        try:
            stamp = self._path.stat().st_mtime_ns
        except OSError:
            return []
        if stamp != self._steps_stamp:
            names = (file.name for file in self._path.iterdir())
            numbers = (name[5:-6] for name in names if name.startswith("step_") and name.endswith(".jsonl"))
            self._steps = sorted(int(number) for number in numbers if number.isdecimal())
            self._steps_stamp = stamp
        return self._steps

    def file(self, step: int) -> ResponseFile:
        """The index of a step, made now unless it is known and the file has not changed."""
        path = self._resolve(self._path / f"step_{step}.jsonl")
        known = self._files.pop(step, None)
        if known is None or known.stamp != stamp_of(path):
            known = ResponseFile.read(path)
        self._files[step] = known
        while len(self._files) > 1 and sum(len(file.entries) for file in self._files.values()) > _MOST_ENTRIES:
            self._files.popitem(last=False)
        return known

    def page(self, step: int, wish: Wish, *, first: int, count: int) -> dict[str, Any]:
        """Some groups of a step, each with the responses that fit the wish."""
        file = self.file(step)
        groups = _groups(file.entries)
        chosen: list[tuple[list[Entry], list[Entry]]] = []
        for group in groups.values():
            fitting = [entry for entry in group if _fits(entry, group, wish.filter)]
            if wish.outcome or wish.tool:
                ended_so = [entry for entry in group if not wish.outcome or entry.outcome == wish.outcome]
                kept = {entry.trajectory for entry in ended_so if not wish.tool or wish.tool in entry.tools}
                fitting = [entry for entry in fitting if entry.trajectory in kept]
            if wish.words:
                fitting = [entry for entry in fitting if _has_words(file.head(entry), wish.words)]
            if fitting:
                chosen.append((group, fitting))
        if wish.order != "recorded":
            key = _ORDERS[wish.order]
            chosen = [(group, sorted(fitting, key=key)) for group, fitting in chosen]
            chosen.sort(key=lambda pair: key(pair[1][0]))
        return {
            "step": step,
            "bad_lines": file.bad_lines,
            "counts": counts(file.entries) | _counts_of_trajectories(groups.values()),
            "num_groups": len(chosen),
            "groups": [_show_group(file, group, fitting) for group, fitting in chosen[first : first + count]],
        }

    def token_numbers(self, step: int) -> list[str]:
        """What is recorded of every token of a step's first response; nothing of a file that cannot be read."""
        try:
            file = self.file(step)
            first = file.full_row(file.entries[0]) if file.entries else {}
        except DashboardError:
            return []
        return [name for name in TOKEN_LISTS if name in first]

    def response(self, step: int, row: int) -> dict[str, Any]:
        """One response with the numbers of its tokens."""
        file = self.file(step)
        if not 0 <= row < len(file.entries):
            raise DashboardError(f"step {step} has {len(file.entries)} responses; there is no response {row}.")
        return {"row": row, "step": step, **file.full_row(file.entries[row])}

    def group_of_prompt(self, step: int, key: str) -> dict[str, Any]:
        """All responses of a step to one prompt."""
        file = self.file(step)
        entries = [entry for entry in file.entries if entry.prompt_key == key]
        if not entries:
            raise DashboardError(f"step {step} has no response to this prompt.")
        return {"step": step, **_show_group(file, entries, entries)}

    def search(self, wish: Wish, *, cursor: int, seconds: float, most: int) -> dict[str, Any]:
        """Answers of any step that fit, from the newest step before `cursor` back, for a moment.

        Returns the matches and where to go on; `next` is None at the end.
        """
        steps = [step for step in self.steps() if cursor < 0 or step < cursor]
        matches: list[dict[str, Any]] = []
        until = time.monotonic() + seconds
        num_read = 0
        while steps and len(matches) < most and (time.monotonic() < until or num_read == 0):
            step = steps.pop()
            num_read += 1
            matches += self._matches_in(step, wish)
            cursor = step
        return {"matches": matches[: 2 * most], "next": cursor if steps else None, "left": len(steps)}

    def steps_with_prompt(self, step: int, row: int, *, cursor: int, seconds: float) -> dict[str, Any]:
        """Other steps that answered the prompt of this response, from the newest back, for a moment."""
        file = self.file(step)
        if not 0 <= row < len(file.entries):
            raise DashboardError(f"step {step} has no response {row}.")
        needle = prompt_bytes(file.head(file.entries[row])["prompt"])
        steps = [other for other in self.steps() if cursor < 0 or other < cursor]
        matches: list[int] = []
        until = time.monotonic() + seconds
        num_read = 0
        while steps and (time.monotonic() < until or num_read == 0):
            cursor = steps.pop()
            num_read += 1
            if cursor != step and _file_has(self._resolve(self._path / f"step_{cursor}.jsonl"), needle):
                matches.append(cursor)
        key = file.entries[row].prompt_key
        return {"key": key, "steps": matches, "next": cursor if steps else None, "left": len(steps)}

    def _matches_in(self, step: int, wish: Wish) -> list[dict[str, Any]]:
        path = self._resolve(self._path / f"step_{step}.jsonl")
        if wish.filter == "all" and wish.words and not _file_may_have(path, wish.words):
            return []
        file = ResponseFile.read(path) if step not in self._files else self.file(step)
        groups = _groups(file.entries)
        matches = []
        for entry in file.entries:
            if not _fits(entry, groups[entry.group], wish.filter):
                continue
            head = file.head(entry)
            if not wish.words or _has_words(head, wish.words):
                matches.append({"step": step, **_show(entry, head)})
        return matches


def counts(entries: tuple[Entry, ...]) -> dict[str, int]:
    """How many responses each filter would show."""
    groups = _groups(entries)
    flat = {uid for uid, group in groups.items() if _has_no_signal(group)}
    return {
        "all": len(entries),
        "groups": len(groups),
        "wrong": sum(entry.wrong for entry in entries),
        "truncated": sum(entry.truncated for entry in entries),
        "failed": sum(entry.failed for entry in entries),
        "no_signal": sum(entry.group in flat for entry in entries),
        "groups_without_signal": len(flat),
    }


def _counts_of_trajectories(groups: Iterable[list[Entry]]) -> dict[str, dict[str, int]]:
    """Trajectories by outcome, and by tool that they used."""
    outcomes: Counter[str] = Counter()
    tools: Counter[str] = Counter()
    for group in groups:
        outcomes.update({entry.trajectory: entry.outcome for entry in group if entry.outcome}.values())
        tools.update(tool for _, tool in {(entry.trajectory, tool) for entry in group for tool in entry.tools})
    return {"outcomes": dict(outcomes.most_common()), "tools": dict(tools.most_common())}


def _groups(entries: tuple[Entry, ...]) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    for group in groups.values():
        if group[0].outcome:
            group.sort(key=lambda entry: (entry.trajectory, entry.segment))
    return groups


def _fits(entry: Entry, group: list[Entry], wanted: Filter) -> bool:
    if wanted == "all":
        return True
    if wanted == "no_signal":
        return _has_no_signal(group)
    return bool(getattr(entry, wanted))


def _each_once(group: list[Entry]) -> list[Entry]:
    """One row of every trajectory, the last; all rows of plain responses."""
    last = {entry.trajectory: entry for entry in sorted(group, key=lambda entry: entry.segment)}
    return [last[number] for number in sorted(last)] if group[0].outcome else group


def _has_no_signal(group: list[Entry]) -> bool:
    """Whether nothing can be learned from comparing the responses: all that were scored got the same."""
    group = _each_once(group)
    scores = [entry.score for entry in group if entry.score is not None and not entry.failed]
    return len(group) > 1 and (not scores or max(scores) - min(scores) < _SIGNAL)


def _has_words(head: dict[str, Any], words: str) -> bool:
    wanted = words.casefold()
    return wanted in head["response"].casefold() or wanted in head["prompt"].casefold()


def _show_group(file: ResponseFile, group: list[Entry], shown: list[Entry]) -> dict[str, Any]:
    heads = [file.head(entry) for entry in shown]
    once = _each_once(group)
    scores = [entry.score for entry in once if entry.score is not None and not entry.failed]
    return {
        "key": shown[0].prompt_key,
        "uid": heads[0]["uid"],
        "prompt": heads[0]["prompt"],
        "ground_truth": heads[0]["ground_truth"],
        "size": len(group),
        "mean_score": sum(scores) / len(scores) if scores else None,
        "no_signal": _has_no_signal(group),
        "num_trajectories": len(once) if group[0].outcome else None,
        "scores": [entry.score for entry in once],
        "answers": [_show(entry, head) for entry, head in zip(shown, heads, strict=True)],
    }


def _show(entry: Entry, head: dict[str, Any]) -> dict[str, Any]:
    return {"row": entry.row, "key": entry.prompt_key, **head}


def _file_may_have(path: Path, words: str) -> bool:
    """A quick no: letters and digits stand in a line as they are, whatever their case and whatever is around them."""
    plain = max(("".join(c if c.isascii() and c.isalnum() else " " for c in words)).split(), key=len, default="")
    return not plain or _file_has(path, plain.lower().encode(), fold=True)


def _file_has(path: Path, needle: bytes, *, fold: bool = False) -> bool:
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            chunk = rest + (chunk.lower() if fold else chunk)
            if needle in chunk:
                return True
            rest = chunk[-len(needle) :]
    return False
