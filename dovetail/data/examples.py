"""Rows of files as training examples, all made when the data set is opened, so that bad rows are named before a run.

What an example is, a subclass says: `encode` one row, and `batch` some examples. Knows no template and no loss.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from dovetail.config.data import DataConfig
from dovetail.data.encode import listed_media, pad_id
from dovetail.data.errors import DataError, refuse_rows
from dovetail.data.files import Rows, TableRows, read_rows, without_nulls
from dovetail.data.sampler import shuffled
from dovetail.protocol import DataProto

logger = logging.getLogger(__name__)

Example = TypeVar("Example")


class Renderer(Protocol):
    """What is asked of `dovetail.agents.chat.ChatRenderer`."""

    def with_kwargs(self, **template_kwargs: Any) -> Renderer: ...

    def with_media(self, images: Sequence[Any], videos: Sequence[Any]) -> Renderer: ...

    def start(self, messages: Sequence[Any], tools: Any = None) -> list[int]: ...

    def answer(self, messages: Sequence[Any], tools: Any = None) -> list[int]: ...

    def extend(
        self,
        messages: Sequence[Any],
        new: Sequence[Any],
        *,
        closed: bool,
        tools: Any = None,
        written: Sequence[int] | None = None,
    ) -> list[int] | None: ...


TEXT_ALONE = "preferences are trained as text alone, so leave it out."


class TooLong(DataError):
    """A row that does not fit and may not be cut."""


class ExampleDataset(ABC, Generic[Example]):
    """The examples of one or more files, one after the other."""

    def __init__(
        self,
        files: Sequence[str | Rows],
        tokenizer: Any,
        renderer: Renderer | None,
        config: DataConfig,
        *,
        max_samples: int = -1,
        seed: int = 0,
    ) -> None:
        """`renderer` is None for a tokenizer without a chat template: prompts and responses are then plain text."""
        if not files:
            raise DataError("there are no data files; set data.train_files.")
        self.config = config
        self._tokenizer, self._renderer = tokenizer, renderer
        self._pad_id = pad_id(tokenizer)
        self._files = [read_rows(file) if isinstance(file, str) else file for file in files]
        self._examples: list[Example] = []
        self.source_sizes: list[int] = []
        """Examples of each file."""
        self.num_too_long = 0
        """Rows left out because they do not fit (`data.filter_overlong_prompts`)."""
        self.num_bad = 0
        """Rows left out because they cannot be used (`data.skip_bad_rows`)."""
        row_ids = self._read(max_samples, seed)
        self.row_ids = np.array(row_ids, dtype=np.int64)
        """A number of each example's own, whatever rows are left out."""
        if not self._examples:
            raise DataError(f"{', '.join(file.path for file in self._files)}: no row is left to train on.")

    reads_media = False
    """Whether rows may have images or videos."""

    @abstractmethod
    def encode(self, row: Mapping[str, Any]) -> Iterable[Example]:
        """The examples of one row, at most two; a `DataError`, which need not name the row, when it cannot be used."""

    @abstractmethod
    def batch(self, indices: Sequence[int] | np.ndarray) -> DataProto:
        """These examples, padded."""

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    @property
    def files_digest(self) -> str:
        """Changes when the content of a file does."""
        return hashlib.blake2b(" ".join(file.digest for file in self._files).encode(), digest_size=16).hexdigest()

    @property
    def fingerprint(self) -> str:
        """Changes when any token of any example does."""
        sums = hashlib.blake2b(digest_size=16)
        for example in self._examples:
            sums.update(repr(example).encode())
        return sums.hexdigest()

    def content_digest(self, indices: Sequence[int] | np.ndarray) -> int:
        """A sum over the content of examples, in any order: sums of parts add up, modulo 2**64."""
        hashes = (hashlib.blake2b(repr(self._examples[int(index)]).encode(), digest_size=8) for index in indices)
        return sum(int.from_bytes(one.digest(), "big") for one in hashes) % 2**64

    def _text_ids(self, prompt: str, response: str) -> tuple[list[int], list[int]]:
        """Ids of plain text: the prompt's, and the response's with the end of sequence."""
        if self._tokenizer.eos_token_id is None:
            raise DataError("it is plain text, and the tokenizer names no end of text (eos_token) to close it with.")
        prompt_ids = list(self._tokenizer(prompt)["input_ids"])
        # A tokenizer may end every text with its own token; the response comes before that.
        if len(prompt_ids) > 1 and prompt_ids[-1] == self._tokenizer.eos_token_id:
            prompt_ids = prompt_ids[:-1]
        own = self._tokenizer.encode(response, add_special_tokens=False)
        return prompt_ids, [*own, self._tokenizer.eos_token_id]

    def _read(self, max_samples: int, seed: int) -> list[int]:
        wanted = self._wanted(max_samples, seed)
        refused: list[str] = []
        row_ids: list[int] = []
        first = 0
        for file in self._files:
            before = len(self._examples)
            for number in range(len(file)):
                if first + number not in wanted:
                    continue
                try:
                    row = _values(file, number)
                    if not self.reads_media and any(self._media_of(row)):
                        raise DataError(f"it has images or videos; {TEXT_ALONE}")
                    examples = list(self.encode(row))
                except DataError as error:
                    if isinstance(error, TooLong) and self.config.filter_overlong_prompts:
                        self.num_too_long += 1
                    else:
                        refused.append(f"{file.path} row {number}: {error}")
                    continue
                self._examples += examples
                row_ids += [2 * (first + number) + part for part in range(len(examples))]
            self.source_sizes.append(len(self._examples) - before)
            first += len(file)
        if self.num_too_long:
            logger.warning("%d rows do not fit and are left out", self.num_too_long)
        refuse_rows(refused, skip=self.config.skip_bad_rows)
        self.num_bad = len(refused)
        return row_ids

    def _media_of(self, row: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """The images and the videos of a row, as the file has them."""
        return listed_media(row, self.config.image_key), listed_media(row, self.config.video_key)

    def row_of(self, index: int) -> Mapping[str, Any]:
        """The row that an example is made of."""
        number = int(self.row_ids[index]) // 2
        for file in self._files:
            if number < len(file):
                return _values(file, number)
            number -= len(file)
        raise AssertionError("every example is of a row of one of the files")

    def _wanted(self, max_samples: int, seed: int) -> range | set[int]:
        total = sum(len(file) for file in self._files)
        if max_samples < 0 or max_samples >= total:
            return range(total)
        order = shuffled(total, seed, -1) if self.config.shuffle else np.arange(total)
        return set(order[:max_samples].tolist())


def _values(file: Rows, number: int) -> Mapping[str, Any]:
    return without_nulls(file[number]) if isinstance(file, TableRows) else file[number]


def pad_rows(rows: Sequence[tuple[Sequence[int], Sequence[int]]], pad_id: int) -> dict[str, torch.Tensor]:
    """Model inputs and `loss_mask` of rows of (token ids, mask), padded on the right."""
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((len(rows), width), pad_id, dtype=torch.int32)
    attention_mask = torch.zeros(len(rows), width, dtype=torch.int8)
    loss_mask = torch.zeros(len(rows), width, dtype=torch.int8)
    for number, (ids, mask) in enumerate(rows):
        input_ids[number, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        attention_mask[number, : len(ids)] = 1
        loss_mask[number, : len(ids)] = torch.tensor(mask, dtype=torch.int8)
    positions = torch.arange(width, dtype=torch.int32).expand(len(rows), width) * attention_mask
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": positions,
        "loss_mask": loss_mask,
    }
