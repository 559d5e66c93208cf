"""Find prompts that are too long, quickly: whole chunks are tokenised at once, by several processes if asked."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from dovetail.data.encode import PromptEncoder
from dovetail.data.files import Rows


def prompt_lengths(rows: Rows, encoder: PromptEncoder, prompt_key: str, *, num_workers: int = 1) -> np.ndarray:
    """Tokens of every prompt of a file, in order."""
    chunks = _chunks(rows, prompt_key)
    if num_workers <= 1:
        lengths = [_measure(encoder, rows.path, first, prompts) for first, prompts in chunks]
        return np.concatenate(lengths) if lengths else np.empty(0, dtype=np.int64)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_set_encoder, initargs=(encoder,)) as pool:
        futures = [pool.submit(_measure_in_worker, rows.path, first, prompts) for first, prompts in chunks]
        lengths = [future.result() for future in futures]
    return np.concatenate(lengths) if lengths else np.empty(0, dtype=np.int64)


def _chunks(rows: Rows, prompt_key: str) -> Iterator[tuple[int, list[Any]]]:
    first = 0
    for chunk in rows.chunks([prompt_key]):
        yield first, [row[prompt_key] for row in chunk]
        first += len(chunk)


def _measure(encoder: PromptEncoder, path: str, first: int, prompts: Sequence[Any]) -> np.ndarray:
    lengths = np.zeros(len(prompts), dtype=np.int64)
    chats = [encoder.messages(prompt, f"{path} row {first + i}") for i, prompt in enumerate(prompts)]
    for is_chat in (True, False):
        places = [i for i, messages in enumerate(chats) if isinstance(messages, str) != is_chat]
        texts = [encoder.render(chats[i], f"{path} row {first + i}") for i in places]
        lengths[places] = [len(ids) for ids in encoder.token_ids(texts, is_chat=is_chat)]
    return lengths


_encoder: PromptEncoder | None = None


def _set_encoder(encoder: PromptEncoder) -> None:
    global _encoder
    _encoder = encoder


def _measure_in_worker(path: str, first: int, prompts: Sequence[Any]) -> np.ndarray:
    assert _encoder is not None, "the initializer has set it"
    return _measure(_encoder, path, first, prompts)
