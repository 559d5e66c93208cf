"""`PromptDataset`: rows of files as prompts ready for generation, and batches of them as `DataProto`.

Columns read: `prompt` (messages or text), `data_source`, `reward_model.ground_truth`; optional `extra_info`, `images`,
`videos`; all others pass through. Prompts are left-padded to `data.max_prompt_length`. The trainer assigns `uid`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dovetail.config.data import DataConfig
from dovetail.data.encode import (
    Loader,
    MediaPrompt,
    Messages,
    PromptEncoder,
    load_image,
    open_image,
    pad_prompt,
    process_media,
    truncate,
)
from dovetail.data.errors import DataError, refuse_rows
from dovetail.data.files import UNNAMED_SOURCE, Rows, needed_columns, read_rows
from dovetail.data.sampler import shuffled
from dovetail.data.scan import RowRules, ground_truth_problem, scan_rows
from dovetail.protocol import DataProto
from dovetail.protocol.schema import COLUMNS

logger = logging.getLogger(__name__)

_FROM_THE_FILE = ("data_source", "reward_model", "extra_info")
RESERVED = frozenset(COLUMNS) - set(_FROM_THE_FILE) | {"index", "full_prompts", "reward_failed"}
"""Names that the columns of a batch have. A file's own columns of these names are found in `extra_info` alone."""

_INFOS_READ = 100


class PromptDataset:
    """Prompts of one or more files, one after the other. A user's dataset (`data.custom_cls`) may inherit from it."""

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: DataConfig,
        processor: Any = None,
        *,
        max_samples: int = -1,
        seed: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
        requires_ground_truth: bool = True,
        image_loader: Loader = load_image,
    ) -> None:
        paths = [data_files] if isinstance(data_files, str) else list(data_files)
        if not paths:
            raise DataError("there are no data files; set data.train_files.")
        self.config = config
        self.tokenizer = tokenizer
        self.processor = processor
        self.encoder = PromptEncoder(tokenizer, dict(config.apply_chat_template_kwargs), tools)
        self._load_image = image_loader
        self._requires_ground_truth = requires_ground_truth
        self._files = [read_rows(path) for path in paths]
        for file in self._files:
            self._check_columns(file)
        self._taken = (config.prompt_key, config.image_key, config.video_key)
        columns = dict.fromkeys(name for file in self._files for name in file.columns)
        self._moved = [name for name in columns if name in RESERVED and name not in self._taken]
        if self._moved:
            logger.warning("the columns %s have names of the batch's own; reward functions find them in extra_info",
                           ", ".join(self._moved))  # fmt: skip
        media = {config.image_key, config.video_key}
        self._has_media = processor is not None and any(media & set(file.columns) for file in self._files)
        self._kept = self._choose_rows(max_samples, seed)
        self._bounds = np.cumsum([0, *(len(kept) for kept in self._kept)])
        if len(self) == 0:
            self._raise_empty(paths)

    def __len__(self) -> int:
        return int(self._bounds[-1])

    @property
    def source_sizes(self) -> list[int]:
        """Prompts of each file, after filters. Row numbers of a file are contiguous."""
        return [len(kept) for kept in self._kept]

    @property
    def row_ids(self) -> np.ndarray:
        """For every prompt the number of its row among all rows of all files; a filter does not change it."""
        starts = np.cumsum([0, *(len(file) for file in self._files)])
        return np.concatenate([start + kept for start, kept in zip(starts[:-1], self._kept, strict=True)])

    @property
    def files_digest(self) -> str:
        """Changes when the content of a file does, whatever the choice of rows."""
        return hashlib.blake2b(" ".join(file.digest for file in self._files).encode(), digest_size=16).hexdigest()

    def content_digest(self, indices: Sequence[int] | np.ndarray) -> int:
        """A sum over the content of rows, in any order: sums of parts add up, modulo 2**64."""
        total = 0
        for index in indices:
            row, _ = self._row(int(index))
            text = json.dumps(row, sort_keys=True, default=_as_text).encode()
            total += int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        return total % 2**64

    @property
    def fingerprint(self) -> str:
        """Changes when the files or the choice of rows do; a sampler's position means nothing on other data."""
        sums = hashlib.blake2b(digest_size=16)
        for file, kept in zip(self._files, self._kept, strict=True):
            sums.update(file.digest.encode())
            sums.update(np.ascontiguousarray(kept, dtype=np.int64).tobytes())
        return sums.hexdigest()

    def data_sources(self) -> list[str]:
        """Every value of the column that selects a reward, once."""
        key = self.config.reward_fn_key
        named = [file for file in self._files if key in file.columns]
        sources = [self._source(row) for file in named for chunk in file.chunks([key]) for row in chunk]
        return list(dict.fromkeys(sources)) or [UNNAMED_SOURCE]

    def values_of(self, column: str) -> list[str] | None:
        """Every value of a column of the batch, once, as text; None where a file lacks it."""
        if column == "data_source":
            return self.data_sources()
        if column in RESERVED or not all(column in file.columns for file in self._files if len(file)):
            return None
        rows = (row[column] for file in self._files for chunk in file.chunks([column]) for row in chunk)
        return list(dict.fromkeys(map(str, rows)))

    def reward_columns(self) -> list[str]:
        """What a reward function may ask for by name: the files' columns, and what is in `extra_info` of the first
        rows."""
        others = (*self._taken, *_FROM_THE_FILE)
        own = [name for file in self._files for name in file.columns if name not in others]
        infos = [self._row(index)[0].get("extra_info") or {} for index in range(min(len(self), _INFOS_READ))]
        return list(dict.fromkeys(["prompt", *own, *(name for info in infos for name in info)]))

    def has_media(self) -> bool:
        """Whether any row holds an image or a video; reads no further than the first."""
        keys = (self.config.image_key, self.config.video_key)
        return any(
            row[key]
            for file in self._files
            for key in keys
            if key in file.columns
            for chunk in file.chunks([key])
            for row in chunk
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One prompt: tensors of width `max_prompt_length`, and plain values."""
        row, where = self._row(index)
        config = self.config
        messages = self.encoder.messages(row.get(config.prompt_key), where)
        if row.get(config.image_key) or row.get(config.video_key):
            encoded = self._encode_media(row, messages, where)
        else:
            encoded = self._encode_text(messages, where)
        taken = (*self._taken, *self._moved)
        example = {name: value for name, value in row.items() if name not in taken}
        own = {name: value for name, value in row.items() if name not in (*self._taken, *_FROM_THE_FILE)}
        example["data_source"] = self._source(row)
        example["reward_model"] = self._ground_truth(row, where)
        example["extra_info"] = {"prompt": row.get(config.prompt_key)} | own | (row.get("extra_info") or {})
        example["index"] = int(index)
        if config.return_raw_chat:
            example["raw_prompt"] = messages
        return {**example, **encoded}

    def batch(self, indices: Sequence[int] | np.ndarray) -> DataProto:
        """Several prompts as a batch."""
        return collate([self[int(index)] for index in indices])

    def _encode_text(self, messages: Messages | str, where: str) -> dict[str, Any]:
        text = self.encoder.render(messages, where)
        ids = self.encoder.token_ids([text], is_chat=not isinstance(messages, str))[0]
        ids = truncate(ids, self.config.max_prompt_length, self.config.truncation, where)
        # Every batch of a run has the same columns: batches are joined, and all ranks must call the same networks.
        return self._padded(ids, text, raw_ids=ids) | (self._media_columns({}, {}) if self._has_media else {})

    def _encode_media(self, row: Mapping[str, Any], messages: Messages | str, where: str) -> dict[str, Any]:
        prompt = self._media_prompt(row, messages, where)
        # A cut would separate placeholders from the pixels they stand for, so it is refused whatever the setting.
        ids = truncate(prompt.ids, self.config.max_prompt_length, "error", where)
        # The engine widens the placeholders itself: it gets the ids of the text as written.
        encoded = self._padded(ids, prompt.text, raw_ids=self.encoder.token_ids([prompt.text], is_chat=True)[0])
        return encoded | self._media_columns(prompt.media, prompt.inputs)

    def _media_columns(self, pictures: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
        columns = {"multi_modal_data": pictures}
        return columns | {"multi_modal_inputs": tensors} if self.config.return_multi_modal_inputs else columns

    def _media_prompt(self, row: Mapping[str, Any], messages: Messages | str, where: str) -> MediaPrompt:
        if self.processor is None or isinstance(messages, str):
            raise DataError(f"{where} has images or videos, but the model has no processor or no chat template for it.")
        images = [self._opened(source, where) for source in row.get(self.config.image_key) or []]
        videos = list(row.get(self.config.video_key) or [])
        settings = {"tools": list(self.encoder.tools)} if self.encoder.tools else {}
        return process_media(
            self.processor,
            messages,
            images,
            videos,
            where,
            processor_kwargs=self.config.mm_processor_kwargs,
            **settings,
            **self.encoder.template_kwargs,
        )

    def _opened(self, source: Any, where: str) -> Any:
        try:
            return open_image(source, self._load_image)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

    def _padded(self, ids: list[int], text: str, *, raw_ids: list[int]) -> dict[str, Any]:
        padded = pad_prompt(ids, self.tokenizer, self.config.max_prompt_length)
        encoded: dict[str, Any] = {**padded, "raw_prompt_ids": raw_ids}
        return {**encoded, "full_prompts": text} if self.config.return_full_prompt else encoded

    def _row(self, index: int) -> tuple[dict[str, Any], str]:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} is out of range for {len(self)} prompts.")
        number = int(np.searchsorted(self._bounds, index, side="right")) - 1
        row = int(self._kept[number][index - self._bounds[number]])
        return self._files[number][row], f"{self._files[number].path} row {row}"

    def _source(self, row: Mapping[str, Any]) -> str:
        source = row.get(self.config.reward_fn_key)
        return UNNAMED_SOURCE if source is None else str(source)

    def _ground_truth(self, row: Mapping[str, Any], where: str) -> Any:
        reward_model = row.get("reward_model")
        truth = next((row[name] for name in ("ground_truth", "answer") if row.get(name) is not None), None)
        if reward_model is None and truth is not None:
            reward_model = {"ground_truth": truth}
        if self._requires_ground_truth and (problem := ground_truth_problem(reward_model)) is not None:
            raise DataError(f"{where}: {problem}")
        return reward_model

    def _check_columns(self, file: Rows) -> None:
        needed = needed_columns(self.config, scored_by_rules=self._requires_ground_truth)
        for name, way_out in needed.items():
            if len(file) and name not in file.columns:
                raise DataError(f"{file.path} has no column {name!r}, only {', '.join(file.columns)}{way_out}.")

    def _choose_rows(self, max_samples: int, seed: int) -> list[np.ndarray]:
        sizes = [len(file) for file in self._files]
        chosen = np.arange(sum(sizes))
        if 0 <= max_samples < len(chosen):
            order = shuffled(len(chosen), seed, -1) if self.config.shuffle else chosen
            chosen = np.sort(order[:max_samples])
        bounds = np.cumsum([0, *sizes])
        parts = [chosen[(chosen >= a) & (chosen < b)] - a for a, b in itertools.pairwise(bounds)]
        return self._without_bad_rows(parts)

    def _without_bad_rows(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Look at all rows now, so that none ends the run at its hundredth step; name all that cannot be used."""
        if type(self).__getitem__ is not PromptDataset.__getitem__:  # a user's class may read rows in its own way
            return parts
        config = self.config
        kept: list[np.ndarray] = []
        refused: list[str] = []
        limit = config.max_prompt_length if config.filter_overlong_prompts or config.truncation == "error" else None
        rules = RowRules(
            self.encoder,
            config.prompt_key,
            (config.image_key, config.video_key),
            self._requires_ground_truth,
            limit,
            reads_media=self.processor is not None,
        )
        for file, rows in zip(self._files, parts, strict=True):
            bad = scan_rows(file, rows, rules, num_workers=config.filter_overlong_prompts_workers)
            overlong = [row.row for row in bad if row.is_overlong] if config.filter_overlong_prompts else []
            unusable = [row for row in bad if not (row.is_overlong and config.filter_overlong_prompts)]
            rows = rows[~np.isin(rows, [row.row for row in bad])]
            if config.filter_overlong_prompts:
                overlong += [int(row) for row in rows if self._has_long_media(file, int(row))]
                self._note_left_out(file, len(overlong), len(rows) + len(bad))
            refused += [f"{file.path} row {row.row}: {row.reason}" for row in unusable]
            kept.append(rows[~np.isin(rows, overlong)])
        refuse_rows(refused, skip=config.skip_bad_rows)
        return kept

    def _note_left_out(self, file: Rows, count: int, total: int) -> None:
        logger.info(
            "%s: %d of %d prompts are longer than data.max_prompt_length=%d and are left out",
            file.path, count, total, self.config.max_prompt_length,
        )  # fmt: skip

    def _has_long_media(self, file: Rows, row: int) -> bool:
        config = self.config
        if self.processor is None or not {config.image_key, config.video_key} & set(file.columns):
            return False
        where, values = f"{file.path} row {row}", file[row]
        if not (values.get(config.image_key) or values.get(config.video_key)):
            return False
        messages = self.encoder.messages(values.get(config.prompt_key), where)
        return len(self._media_prompt(values, messages, where).ids) > config.max_prompt_length

    def _raise_empty(self, paths: Sequence[str]) -> None:
        read = sum(len(file) for file in self._files)
        names = ", ".join(paths)
        if read == 0:
            raise DataError(f"{names}: there are no rows.")
        raise DataError(
            f"{names}: none of {read} prompts is left; all are longer than "
            f"data.max_prompt_length={self.config.max_prompt_length}, or bad, or data.*_max_samples is 0."
        )


def _as_text(value: Any) -> str:
    """Values that JSON does not know: pictures as bytes, dates, numbers of other libraries."""
    return hashlib.blake2b(value).hexdigest() if isinstance(value, bytes) else repr(value)


def collate(examples: Sequence[Mapping[str, Any]]) -> DataProto:
    """Stack tensors and line up everything else; a column that some rows lack is None there."""
    names = dict.fromkeys(name for example in examples for name in example)
    tensors, others = {}, {}
    for name in names:
        values = [example.get(name) for example in examples]
        stackable = [value for value in values if isinstance(value, torch.Tensor)]
        if len(stackable) == len(values):
            tensors[name] = torch.stack(stackable)
        elif name == "index":
            others[name] = np.array(values, dtype=np.int64)
        else:
            others[name] = [{} if value is None and name.startswith("multi_modal") else value for value in values]
    return DataProto.from_dict(tensors, others)
