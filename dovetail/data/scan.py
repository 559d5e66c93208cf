"""Look at every row before the first step: which cannot be used, and why. Whole chunks are tokenised at once.

Large files are read by several processes. Opens no image: a prompt with media is checked, not measured.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.data.encode import (
    Messages,
    PromptEncoder,
    listed_media,
    media_kinds,
    place_media,
    short,
    too_long,
)
from dovetail.data.errors import DataError
from dovetail.data.files import Rows

_ROWS_WORTH_PROCESSES = 50_000
_SPECIAL_TOKENS = 8
"""At most so many are added to a plain text. Beyond them an ASCII text has no more tokens than letters."""
_SAY_EVERY_S = 5.0
_SOUNDS = "audios"
"""The column that holds the sounds of a prompt in data for models that hear."""


@dataclass(frozen=True)
class RowRules:
    """What a row must have. `limit` is the longest prompt in tokens; None where longer ones are cut. `reads_media`: the
    model has a processor."""

    encoder: PromptEncoder
    prompt_key: str
    media_keys: tuple[str, str]
    requires_ground_truth: bool
    limit: int | None
    reads_media: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.prompt_key, "reward_model", "extra_info", *self.media_keys, _SOUNDS)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used."""

    row: int
    reason: str
    is_overlong: bool = False


def scan_rows(rows: Rows, wanted: np.ndarray, rules: RowRules, *, num_workers: int | None = None) -> list[BadRow]:
    """Every row among `wanted` (sorted row numbers) that cannot be used, in order. Says how far it is when it takes
    long."""
    if num_workers is None:
        num_workers = 1 if len(wanted) < _ROWS_WORTH_PROCESSES else min(8, os.cpu_count() or 1)
    bad: list[BadRow] = []
    started = said = time.monotonic()
    done = 0
    for count, bad_here in _in_order(_chunks(rows, wanted, rules), rules, num_workers):
        done += count
        bad += bad_here
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            sys.stderr.write(f"{rows.path}: looked at {done} of {len(wanted)} rows in {said - started:.0f} s\n")
    return bad


def ground_truth_problem(reward_model: Any) -> str | None:
    """What is wrong with the column `reward_model` for the built-in rules."""
    if isinstance(reward_model, Mapping) and reward_model.get("ground_truth") is not None:
        return None
    return (
        f"reward_model is {reward_model!r}; it must be a dict with ground_truth, which the built-in rules compare "
        "with. Fill it in, or set custom_reward_function.path to score without it."
    )


Chunk = tuple[list[int], list[dict[str, Any]]]


def _chunks(rows: Rows, wanted: np.ndarray, rules: RowRules) -> Iterator[Chunk]:
    columns = [name for name in rules.columns if name in rows.columns]
    first = 0
    for chunk in rows.chunks(columns):
        here = wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, first + len(chunk))]
        if len(here):
            yield here.tolist(), [chunk[row - first] for row in here]
        first += len(chunk)


def _in_order(chunks: Iterator[Chunk], rules: RowRules, num_workers: int) -> Iterator[tuple[int, list[BadRow]]]:
    if num_workers <= 1:
        for numbers, chunk in chunks:
            yield len(numbers), _look(rules, numbers, chunk)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_set_rules, initargs=(rules,)) as pool:
        running: list[tuple[int, Future[list[BadRow]]]] = []
        for numbers, chunk in chunks:
            running.append((len(numbers), pool.submit(_look_in_worker, numbers, chunk)))
            if len(running) > 4 * num_workers:  # so that a file of gigabytes is not all in flight
                count, first = running.pop(0)
                yield count, first.result()
        for count, future in running:
            yield count, future.result()


def _look(rules: RowRules, numbers: Sequence[int], chunk: Sequence[Mapping[str, Any]]) -> list[BadRow]:
    bad: dict[int, BadRow] = {}
    to_measure: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
    for number, row in zip(numbers, chunk, strict=True):
        try:
            text, is_chat = _text(rules, row)
        except DataError as error:
            bad[number] = BadRow(number, str(error).removeprefix(": "))
            continue
        # What takes least memory to be sure of: most prompts are far below the limit.
        has_media = any(row.get(key) for key in rules.media_keys)
        if rules.limit is not None and not has_media and not _is_surely_short(text, rules.limit):
            to_measure[is_chat].append((number, text))
    for is_chat, texts in to_measure.items():
        ids = rules.encoder.token_ids([text for _, text in texts], is_chat=is_chat)
        for (number, _), tokens in zip(texts, ids, strict=True):
            if len(tokens) > (rules.limit or 0):
                bad[number] = BadRow(number, too_long(len(tokens), rules.limit or 0), is_overlong=True)
    return [bad[number] for number in sorted(bad)]


def _text(rules: RowRules, row: Mapping[str, Any]) -> tuple[str, bool]:
    if rules.requires_ground_truth and (problem := ground_truth_problem(row.get("reward_model"))) is not None:
        raise DataError(problem)
    if (info := row.get("extra_info")) and not isinstance(info, Mapping):
        raise DataError(f"extra_info is {short(info)}; it must be a dict (in JSON an object), or null.")
    messages = rules.encoder.messages(row.get(rules.prompt_key), "")
    _check_media(rules, row, messages)
    text = rules.encoder.render(messages, "")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"the prompt is not Unicode text: {error}.") from error
    return text, not isinstance(messages, str)


def _check_media(rules: RowRules, row: Mapping[str, Any], messages: Messages | str) -> None:
    if listed_media(row, _SOUNDS):
        raise DataError(f"it has sounds (column {_SOUNDS}), which no model is given here; leave such rows out.")
    images, videos = (listed_media(row, key) for key in rules.media_keys)
    kinds = [] if isinstance(messages, str) else media_kinds(messages)
    if not rules.reads_media or isinstance(messages, str):
        if images or videos or kinds:
            raise DataError(
                "it has images or videos, but the model has no processor or no chat template for them; use a model "
                "that sees them, or leave them out."
            )
    # In a file without such a column "<image>" is text like any other.
    elif kinds or any(key in row for key in rules.media_keys):
        place_media(messages, len(images), len(videos), "")


def _is_surely_short(text: str, limit: int) -> bool:
    return len(text) + _SPECIAL_TOKENS <= limit and text.isascii()


_rules: RowRules | None = None


def _set_rules(rules: RowRules) -> None:
    global _rules
    _rules = rules


def _look_in_worker(numbers: Sequence[int], chunk: Sequence[Mapping[str, Any]]) -> list[BadRow]:
    assert _rules is not None, "the initializer has set it"
    return _look(_rules, numbers, chunk)
