"""One `step_N.jsonl` of responses: an index of its lines, and a line when it is asked for.

Lines end with long lists of numbers, one per token. The index reads what stands before them, and keeps numbers only: a
file may be far larger than memory.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.dashboard.run_files import DashboardError, parse_object, read_at
from dovetail.dashboard.trajectories import conversation, summary

# In a JSON line an unescaped quote cannot be inside a text, so this is the key and never somebody's answer.
_FIRST_TOKEN_LIST = b', "response_ids": ['
TOKEN_LISTS = (
    "response_ids",
    "token_ends",
    "token_advantages",
    "token_logprob_gaps",
    "token_entropies",
    "token_mask",
    "token_versions",
)
_LONGEST_LINE = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index knows of a response."""

    row: int
    offset: int
    size: int
    group: str
    prompt_key: str
    score: float | None
    advantage: float | None
    length: int
    truncated: bool
    failed: bool
    wrong: bool
    gap: float | None
    outcome: str
    """Of an agent's trajectory; empty for a plain response."""
    trajectory: int
    """Number in the group."""
    segment: int
    tools: tuple[str, ...]


@dataclass(frozen=True)
class ResponseFile:
    """The index of a file, and whether the file on disk is still the one indexed (`stamp`)."""

    path: Path
    stamp: tuple[int, int]
    entries: tuple[Entry, ...]
    bad_lines: int

    @classmethod
    def read(cls, path: Path) -> ResponseFile:
        """Index a file. Lines that are no JSON objects are counted, not shown."""
        entries: list[Entry] = []
        bad = 0
        for offset, line in _lines(path):
            head = parse_head(line)
            if head is None:
                bad += 1
                continue
            entries.append(_entry(len(entries), offset, len(line), head))
        return cls(path, stamp_of(path), tuple(entries), bad)

    def head(self, entry: Entry) -> dict[str, Any]:
        """A response without the numbers of its tokens."""
        return plain_names(self._row(entry, parse_head))

    def full_row(self, entry: Entry) -> dict[str, Any]:
        """A response with the numbers of its tokens, where they were recorded."""
        row = self._row(entry, parse_object)
        tokens = {name: row[name] for name in TOKEN_LISTS if isinstance(row.get(name), list)}
        if "token_versions" in tokens:
            tokens["token_versions"] = [version for version, count in tokens["token_versions"] for _ in range(count)]
        more = conversation(row) if summary(row) else {}
        return {**plain_names(row), **more, **tokens}

    def _row(self, entry: Entry, parse: Callable[[bytes], dict[str, Any] | None]) -> dict[str, Any]:
        row = parse(read_at(self.path, entry.offset, entry.size))
        if row is None:
            raise DashboardError(f"{self.path.name} changed while it was read; load the page again.", status=409)
        return row


def stamp_of(path: Path) -> tuple[int, int]:
    """Changes when the file does."""
    try:
        status = path.stat()
    except OSError:
        raise DashboardError(f"there is no {path.parent.name}/{path.name} in this run.") from None
    return status.st_mtime_ns, status.st_size


def parse_head(line: bytes) -> dict[str, Any] | None:
    """A line up to its lists of numbers."""
    cut = line.find(_FIRST_TOKEN_LIST)
    return parse_object(line if cut < 0 else line[:cut] + b"}")


def prompt_key(prompt: Any) -> str:
    """The same for the same prompt, in whatever step."""
    return hashlib.sha1(str(prompt).encode(), usedforsecurity=False).hexdigest()[:16]


def prompt_bytes(prompt: Any) -> bytes:
    """How a prompt stands in a line: to find it without parsing."""
    return f'"prompt": {json.dumps(prompt, ensure_ascii=False)}'.encode()


def plain_names(row: dict[str, Any]) -> dict[str, Any]:
    """Answers of training and of validation under the same names."""
    values = row.get("values") if isinstance(row.get("values"), dict) else {}
    assert isinstance(values, dict)
    score = row.get("score", values.get("reward"))
    known = {*TOKEN_LISTS, "values", "prompt", "response", "score", "advantage", "truncated"}
    extra = {name: value for name, value in {**row, **values}.items() if name not in known and _is_plain(value)}
    return {
        "prompt": str(row.get("prompt") or ""),
        "response": str(row.get("response") or ""),
        "uid": str(row.get("uid", "")),
        "ground_truth": row.get("ground_truth"),
        "score": _number(score),
        "advantage": _number(row.get("advantage")),
        "gap": _number(row.get("logprob_gap")),
        "length": int(_number(row.get("response_length", row.get("length"))) or 0),
        "truncated": bool(row.get("truncated", False)),
        "failed": bool(row.get("reward_failed", row.get("failed", False))),
        "wrong": _is_wrong(score, row.get("acc", values.get("acc"))),
        "extra": extra,
        "agent": summary(row),
    }


def _entry(row: int, offset: int, size: int, head: dict[str, Any]) -> Entry:
    plain = plain_names(head)
    key = prompt_key(plain["prompt"])
    names = ("score", "advantage", "length", "truncated", "failed", "wrong", "gap")
    agent = plain["agent"] or {"outcome": "", "trajectory": 0, "segment": 0, "tools": ()}
    return Entry(
        row,
        offset,
        size,
        plain["uid"] or key,
        key,
        **{name: plain[name] for name in names},
        outcome=sys.intern(agent["outcome"]),
        trajectory=agent["trajectory"],
        segment=agent["segment"],
        tools=tuple(map(sys.intern, agent["tools"])),
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    stamp_of(path)
    offset = 0
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if line.strip():
                yield offset, line.rstrip(b"\n")
            offset += len(line)


def _is_wrong(score: Any, accuracy: Any) -> bool:
    """By the reward's own word for right and wrong where it has one, else by a score that is not positive."""
    if isinstance(accuracy, (bool, int, float)):
        return float(accuracy) < 0.5
    number = _number(score)
    return number is not None and number <= 0


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float, bool))
