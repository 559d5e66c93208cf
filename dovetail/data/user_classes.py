"""A user's data set (`data.custom_cls`) and sampler (`data.sampler`), also those written for verl or torch.

The data set is built as verl builds it, `(data_files, tokenizer, config, processor)`, with a config that has `get`. A
row has `raw_prompt` (messages) or `input_ids`; what is missing beside it is made here. Everything else passes through.

The sampler gives row numbers from its `__iter__`, epoch after epoch. Random numbers are seeded before each epoch, so a
resumed run draws the same order. A sampler that learns from the batches (`update`) is asked for row after row, and must
keep its own state (`state_dict`, `load_state_dict`) to be resumed.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dovetail.config.data import DataConfig
from dovetail.config.signatures import named_arguments
from dovetail.config.view import ConfigView
from dovetail.data.encode import PromptEncoder, pad_prompt, truncate
from dovetail.data.errors import DataError
from dovetail.data.sampler import PromptSampler


class CustomPrompts:
    """Rows of `dataset`, completed."""

    def __init__(self, dataset: Any, encoder: PromptEncoder, config: DataConfig) -> None:
        self.dataset = dataset
        self._encoder = encoder
        self._config = config
        self.fingerprint: str = getattr(dataset, "fingerprint", "")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.dataset[index]
        where = f"row {index} of {type(self.dataset).__name__} (data.custom_cls)"
        if not isinstance(row, Mapping):
            raise DataError(f"{where} is a {type(row).__name__}; it must be a dict of columns.")
        row = {name: value for name, value in row.items() if name != "dummy_tensor"}
        row |= self._tokens(row, where)
        if (source := row.get(self._config.reward_fn_key)) is not None:
            row["data_source"] = str(source)
        row["index"] = int(index)
        return row

    def _tokens(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        if "input_ids" not in row:
            if "raw_prompt" not in row:
                raise DataError(
                    f"{where} has no input_ids and no raw_prompt, only {', '.join(row)}; give one of the two."
                )
            ids = self._encoder.encode(_as_list(row["raw_prompt"]), where)
            ids = truncate(ids, self._config.max_prompt_length, self._config.truncation, where)
            return {**pad_prompt(ids, self._encoder.tokenizer, self._config.max_prompt_length), "raw_prompt_ids": ids}
        made: dict[str, Any] = {}
        ids, mask = torch.as_tensor(row["input_ids"]), row.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else torch.as_tensor(mask)
        if len(ids) != self._config.max_prompt_length:
            kept = truncate(ids[mask.bool()].tolist(), self._config.max_prompt_length, self._config.truncation, where)
            made |= pad_prompt(kept, self._encoder.tokenizer, self._config.max_prompt_length)
            ids, mask = made["input_ids"], made["attention_mask"]
        if "raw_prompt_ids" not in row:
            made["raw_prompt_ids"] = ids[mask.bool()].tolist()
        made.setdefault("attention_mask", mask)
        if "position_ids" not in row:
            made["position_ids"] = (mask.cumsum(0) - 1).clamp(min=0)
        return made


def build_custom_prompts(
    cls: Any, paths: Sequence[str], encoder: PromptEncoder, config: DataConfig, processor: Any, max_samples: int
) -> CustomPrompts:
    """An instance of the user's class with its rows completed."""
    given = {
        "data_files": list(paths),
        "tokenizer": encoder.tokenizer,
        "config": ConfigView(config),
        "processor": processor,
        "max_samples": max_samples,
    }
    required = {name: given[name] for name in ("data_files", "tokenizer", "config", "processor")}
    dataset = cls(**(required | named_arguments(cls, given)))
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        name = getattr(cls, "__name__", str(cls))
        raise DataError(f"data.custom_cls: {name} of {config.custom_cls.path} needs __len__ and __getitem__.")
    return CustomPrompts(dataset, encoder, config)


def _as_list(prompt: Any) -> Any:
    """Messages as a list: verl's rows hold them as an array."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


def make_torch_sampler(cls: type, dataset: Any, data: DataConfig) -> Any:
    """An instance by verl's constructor, `(data_source, data_config)`, or by torch's, `(data_source)`."""
    names = inspect.signature(cls).parameters
    given = {"data_source": dataset, "data_config": ConfigView(data)}
    named = {name: value for name, value in given.items() if name in names}
    return cls(**named) if named else cls(dataset)


class TorchOrder(PromptSampler):
    """`PromptSampler` over `sampler`, whose iterator gives row numbers of `dataset`."""

    def __init__(self, source_sizes: list[int], *, sampler: Any, **settings: Any) -> None:
        super().__init__(source_sizes, **settings)
        self._sampler = sampler
        self._rows: Iterator[Any] | None = None
        self._orders: dict[int, np.ndarray] = {}
        self._update: Callable[..., Any] | None = getattr(sampler, "update", None)

    @property
    def learns(self) -> bool:
        """Whether the order depends on the batches of earlier steps."""
        return self._update is not None

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        sampler = getattr(self, "_sampler", None)
        return super().num_rows if sampler is None or not hasattr(sampler, "__len__") else len(sampler)

    def update(self, batch: Any) -> None:
        """Show a sampler that learns the batch of a finished step."""
        if self._update is not None:
            self._update(batch=batch)

    def next_batch(self) -> np.ndarray:
        if not self.learns:
            return super().next_batch()
        if self._is_over():
            self._begin(self._epoch + 1)
        if self._rows is None:
            self._rows = iter(self._sampler)
        wanted = min(self._batch_size, self.num_rows - self._position)
        rows = [row for _, row in zip(range(wanted), self._rows, strict=False)]
        self._check(rows, wanted)
        self._position += len(rows)
        return np.array(rows, dtype=np.int64)

    def epoch_order(self, epoch: int) -> np.ndarray:
        # Every epoch in turn: a sampler may keep count of its own.
        for number in range(len(self._orders), epoch + 1):
            self._orders[number] = self._drawn(number)
        return self._orders[epoch]

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if hasattr(self._sampler, "state_dict"):
            state["sampler"] = self._sampler.state_dict()
        elif not self.learns and self._order is not None:
            state["order"] = _digest(self._order)
        return state

    def load_state_dict(self, state: dict[str, Any], digest: Callable[[np.ndarray], str] | None = None) -> None:
        super().load_state_dict(state, digest)
        name = type(self._sampler).__name__
        if "sampler" in state:
            self._sampler.load_state_dict(state["sampler"])
            self._rows = None
        elif self.learns:
            raise DataError(
                f"data.sampler: {name} learns from the batches (update) and has no state_dict and load_state_dict, so "
                "a run cannot be resumed with it; add the two, or start anew with trainer.resume_mode=disable."
            )
        elif "order" in state and _digest(self.epoch_order(self._epoch)) != state["order"]:
            raise DataError(
                f"data.sampler: {name} gives another order for epoch {self._epoch} than when the checkpoint was made; "
                "draw from torch's, numpy's or Python's global generator, which are seeded before each epoch, or add "
                "state_dict and load_state_dict."
            )

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        self._rows = None

    def _drawn(self, epoch: int) -> np.ndarray:
        seed = (self._seed * 1_000_003 + epoch) % 2**32
        python, numpy = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)
                rows = [int(row) for row in self._sampler]
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
        self._check(rows, self.num_rows)
        return np.array(rows, dtype=np.int64)

    def _check(self, rows: list[Any], wanted: int) -> None:
        total = sum(self._sizes)
        outside = [row for row in rows if not 0 <= int(row) < total]
        if outside or len(rows) < wanted:
            what = f"row {outside[0]}" if outside else f"{len(rows)} rows where {wanted} were due"
            raise DataError(
                f"data.sampler: {type(self._sampler).__name__} gave {what}; its __iter__ must give as many row numbers "
                f"as its __len__ says, each from 0 to {total - 1}."
            )


def _digest(order: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(order).tobytes(), digest_size=8).hexdigest()
