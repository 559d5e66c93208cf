"""Answers to validation prompts that trackers show beside their curves: which, and as text. Opens no tracker."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAME = "val/generations"
"""What trackers call the table."""

COLUMNS = ("step", "input", "output", "score")
_SEED = 42


@dataclass(frozen=True)
class ShownAnswer:
    """`score` is None for an answer that could not be scored."""

    input: str
    output: str
    score: float | None


def choose_answers(rows: Sequence[Mapping[str, Any]], count: int) -> list[ShownAnswer]:
    """`count` of them, -1: all. Every validation of the same prompts chooses the same places, so answers compare."""
    places = range(len(rows)) if count < 0 else random.Random(_SEED).sample(range(len(rows)), min(count, len(rows)))
    return [ShownAnswer(rows[place]["input"], rows[place]["output"], rows[place]["score"]) for place in sorted(places)]


def table_rows(step: int, answers: Sequence[ShownAnswer]) -> list[list[Any]]:
    """A row of `COLUMNS` for each."""
    return [[step, answer.input, answer.output, answer.score] for answer in answers]


def answer_text(step: int, answer: ShownAnswer) -> str:
    """For a terminal."""
    score = "none" if answer.score is None else f"{answer.score:.4g}"
    return f"step {step}: validation answer, score {score}\n  input: {answer.input}\n  output: {answer.output}"


def markdown_table(answers: Sequence[ShownAnswer]) -> str:
    """Where a tracker has Markdown and no tables. Texts stay as they are, line breaks included."""
    rows = [[_cell(answer.input), _cell(answer.output), _score(answer.score)] for answer in answers]
    return "\n".join(f"| {' | '.join(row)} |" for row in (list(COLUMNS[1:]), ["---"] * 3, *rows))


def _score(score: float | None) -> str:
    return "" if score is None else f"{score:.4g}"


def _cell(text: str) -> str:
    for sign, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("\n", "<br>")):
        text = text.replace(sign, safe)
    return text
