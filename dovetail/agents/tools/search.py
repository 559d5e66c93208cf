"""`search`: the passages of a local corpus that fit a query best, by BM25. No server, no embedding."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np

from dovetail.agents.tools.functions import FunctionToolbox
from dovetail.agents.tools.schema import ToolError, read_signature

_WORD = re.compile(r"\w+")
_TEXT_KEYS = ("text", "contents", "content", "passage")
_K1, _B = 1.5, 0.75


class SearchIndex:
    """BM25 over texts, in memory."""

    def __init__(self, texts: list[str]) -> None:
        counts = [Counter(_words(text)) for text in texts]
        lengths = np.array([sum(count.values()) for count in counts], dtype=np.float64)
        norm = _K1 * (1 - _B + _B * lengths / max(lengths.mean() if len(texts) else 0.0, 1.0))
        postings: dict[str, list[tuple[int, int]]] = {}
        for number, count in enumerate(counts):
            for word, times in count.items():
                postings.setdefault(word, []).append((number, times))
        self._size = len(texts)
        self._postings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word, entries in postings.items():
            numbers = np.array([number for number, _ in entries], dtype=np.int64)
            times = np.array([times for _, times in entries], dtype=np.float64)
            rarity = math.log(1 + (self._size - len(entries) + 0.5) / (len(entries) + 0.5))
            self._postings[word] = (numbers, rarity * times * (_K1 + 1) / (times + norm[numbers]))

    def search(self, query: str, k: int) -> list[int]:
        """Numbers of the best texts, best first; those without a word of the query are left out."""
        scores = np.zeros(self._size)
        for word in _words(query):
            if word in self._postings:
                numbers, weights = self._postings[word]
                scores[numbers] += weights
        order = np.argsort(-scores, kind="stable")[:k]
        return [int(number) for number in order if scores[number] > 0]


class SearchToolbox(FunctionToolbox):
    """One tool, `search(query)`, over a JSONL file of {"text" or "contents": ..., "title": ... (optional)}."""

    def __init__(self, corpus_path: str, *, name: str = "search", top_k: int = 3) -> None:
        self._passages = read_corpus(corpus_path)
        self._index = SearchIndex(self._passages)
        self._top_k = top_k
        self._functions = {name: (read_signature(self.search, name=name), self.search)}

    def search(self, query: str) -> str:
        """Search the corpus for passages.

        Args:
            query: Words that the passages should have.
        """
        numbers = self._index.search(query, self._top_k)
        passages = [f"[{rank}] {self._passages[number]}" for rank, number in enumerate(numbers, start=1)]
        return "\n".join(passages) or "Nothing was found."


def read_corpus(path: str) -> list[str]:
    """A passage for each line, its title first."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ToolError(f"The corpus {path} of the search tool is not there; give a JSONL file.")
    passages = []
    with file.open() as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                passages.append(_passage(line, f"{path}, line {number}"))
    return passages


def _passage(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ToolError(f"{where} is not JSON: {error}") from error
    key = next((key for key in _TEXT_KEYS if isinstance(entry, dict) and key in entry), None)
    if key is None:
        raise ToolError(f"{where} has no text; name it {' or '.join(_TEXT_KEYS)}.")
    title = entry.get("title")
    return f"{title}: {entry[key]}" if title else str(entry[key])


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
