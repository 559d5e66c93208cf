"""Loaders of training and validation prompts, from configuration: batches in a sampler's order, made ahead if asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from dovetail.config import DovetailConfig
from dovetail.config.user_code import load_user_object
from dovetail.data.encode import PromptEncoder
from dovetail.data.errors import DataError
from dovetail.data.examples import ExampleDataset
from dovetail.data.files import needs_ground_truth
from dovetail.data.prompts import PromptDataset, collate
from dovetail.data.sampler import PromptSampler
from dovetail.data.tool_files import read_tool_file
from dovetail.data.user_classes import TorchOrder, build_custom_prompts, make_torch_sampler
from dovetail.observability.waits import waiting
from dovetail.protocol import DataProto

_SLOW_S = 60.0
"""Rows may name images on a file server, and a dataset of the user's own may do anything."""


class Prompts(Protocol):
    """What a dataset must have: examples by number, as dicts with the columns of the schema's `dataset` stage.

    An `ExampleDataset` makes its batches itself, of examples of its own kind.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


_FOLLOWED = (PromptDataset, ExampleDataset)
"""Datasets whose content is known row by row: a run goes on when rows that it has not read change."""


@dataclass(frozen=True)
class _Read:
    """The sum over the content of the first `count` rows of an epoch."""

    epoch: int = -1
    count: int = 0
    total: int = 0


def _hex(total: int) -> str:
    return f"{total:016x}"


class PromptLoader:
    """Iterate for one epoch, or call `next_batch` without end. Each of `num_workers` threads makes a batch ahead."""

    def __init__(self, dataset: Prompts, sampler: PromptSampler, *, num_workers: int = 0) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self._num_workers = num_workers
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="prompts") if num_workers else None
        self._ahead: deque[tuple[dict[str, Any], Future[DataProto]]] = deque()
        # The sampler may run some batches ahead of what has been given out; this is the state that counts.
        self._state = sampler.state_dict()
        self._read = _Read()

    def __len__(self) -> int:
        """Batches of one epoch."""
        return len(self.sampler)

    @property
    def epoch(self) -> int:
        """Epoch of the last batch given out."""
        return int(self._state["epoch"])

    def __iter__(self) -> Iterator[DataProto]:
        """The batches left in this epoch."""
        for _ in range(self.sampler.batches_after(int(self._state["position"]))):
            yield self.next_batch()
        self._state = {**self._state, "epoch": self.epoch + 1, "position": 0}

    def next_batch(self) -> DataProto:
        """The next batch, in the next epoch when this one is over."""
        with waiting("the driver", "a batch of the data loader", limit_s=_SLOW_S):
            return self._next_batch()

    def _next_batch(self) -> DataProto:
        if self._threads is None:
            indices = self.sampler.next_batch()
            self._state = self.sampler.state_dict()
            return self._make(indices)
        while len(self._ahead) <= self._num_workers:
            indices = self.sampler.next_batch()
            self._ahead.append((self.sampler.state_dict(), self._threads.submit(self._make, indices)))
        self._state, future = self._ahead.popleft()
        return future.result()

    def show_batch(self, batch: DataProto) -> None:
        """The batch of a finished step, for a sampler that learns from it (curriculum)."""
        if isinstance(self.sampler, TorchOrder) and self.sampler.learns:
            self.sampler.update(batch)
            # The next batch follows from what it has learned, and from where it stands now.
            self._state = self.sampler.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, whatever has been made ahead, and a digest of what was read in this epoch."""
        if not isinstance(self.dataset, _FOLLOWED) or isinstance(self.sampler, TorchOrder):
            return dict(self._state)
        return {**self._state, "read": self._digest_of_epoch(self.dataset)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        dataset = self.dataset
        digest = (lambda rows: _hex(dataset.content_digest(rows))) if isinstance(dataset, _FOLLOWED) else None
        self.sampler.load_state_dict(state, digest)
        self._ahead.clear()
        self._state = self.sampler.state_dict()
        self._read = _Read()

    def close(self) -> None:
        """Stop the threads."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _digest_of_epoch(self, dataset: PromptDataset | ExampleDataset[Any]) -> str:
        epoch, position = int(self._state["epoch"]), int(self._state["position"])
        read = self._read
        if read.epoch != epoch or read.count > position:
            read = _Read(epoch)
        # Only what was read since the last time: a checkpoint must not cost a pass over the epoch.
        rows = self.sampler.order_of(epoch)[read.count : position]
        self._read = _Read(epoch, position, (read.total + dataset.content_digest(rows)) % 2**64)
        return _hex(self._read.total)

    def _make(self, indices: Sequence[int] | np.ndarray) -> DataProto:
        if isinstance(self.dataset, ExampleDataset):
            return self.dataset.batch(indices)
        return collate([self.dataset[int(index)] for index in indices])


def example_loader(config: DovetailConfig, dataset: ExampleDataset[Any], *, is_training: bool) -> PromptLoader:
    """Batches of training examples, shuffled and endless, or of validation examples, all of them in order."""
    data = config.data
    build = partial(_build_sampler, config, dataset) if is_training else partial(PromptSampler, dataset.source_sizes)
    sampler = build(
        batch_size=data.train_batch_size if is_training else data.val_batch_size or len(dataset),
        seed=config.data_seed,
        shuffle=data.shuffle if is_training else data.validation_shuffle,
        drop_last=is_training,
        weights=data.train_weights if is_training else None,
        fingerprint=dataset.fingerprint,
    )
    if not isinstance(sampler, TorchOrder):
        sampler.follow(dataset.row_ids, dataset.files_digest)
    return PromptLoader(dataset, sampler, num_workers=data.dataloader_num_workers if is_training else 0)


def build_train_loader(config: DovetailConfig, tokenizer: Any, processor: Any = None) -> PromptLoader:
    """Training prompts, `config.generation_batch_size` at a time, mixed by `data.train_weights`."""
    data = config.data
    dataset = _build_dataset(config, data.train_paths, data.train_max_samples, tokenizer, processor)
    sampler = _build_sampler(
        config,
        dataset,
        batch_size=config.generation_batch_size,
        seed=config.data_seed,
        shuffle=data.shuffle,
        drop_last=True,
        weights=data.train_weights,
        fingerprint=getattr(dataset, "fingerprint", ""),
    )
    if isinstance(dataset, PromptDataset) and not isinstance(sampler, TorchOrder):
        sampler.follow(dataset.row_ids, dataset.files_digest)
    # A batch made ahead would miss what the sampler learns from the step before it.
    learns = isinstance(sampler, TorchOrder) and sampler.learns
    return PromptLoader(dataset, sampler, num_workers=0 if learns else data.dataloader_num_workers)


def build_val_loader(config: DovetailConfig, tokenizer: Any, processor: Any = None) -> PromptLoader | None:
    """Validation prompts, all of them in every epoch; None without `data.val_files`."""
    data = config.data
    if not data.val_paths:
        return None
    dataset = _build_dataset(config, data.val_paths, data.val_max_samples, tokenizer, processor)
    sampler = PromptSampler(
        _source_sizes(dataset),
        batch_size=data.val_batch_size or len(dataset),
        seed=config.data_seed,
        shuffle=data.validation_shuffle,
        drop_last=False,
        fingerprint=getattr(dataset, "fingerprint", ""),
    )
    return PromptLoader(dataset, sampler)


def load_tools(path: str) -> list[dict[str, Any]]:
    """The tool schemas that a YAML file has. Those that only a tool's class knows are added when it is built."""
    return [entry["tool_schema"] for entry in read_tool_file(path) if entry.get("tool_schema")]


def _build_dataset(
    config: DovetailConfig, paths: Sequence[str], max_samples: int, tokenizer: Any, processor: Any
) -> Prompts:
    data = config.data
    tool_path = data.tool_config_path or config.actor_rollout_ref.rollout.multi_turn.tool_config_path
    kwargs: dict[str, Any] = {
        "max_samples": max_samples,
        "seed": config.data_seed,
        "tools": load_tools(tool_path) if tool_path else None,
        "requires_ground_truth": needs_ground_truth(config),
    }
    if data.custom_cls.path is None:
        return PromptDataset(list(paths), tokenizer, data, processor, **kwargs)
    name = data.custom_cls.name or "Dataset"
    cls = load_user_object(data.custom_cls.path, name, key="data.custom_cls.path")
    if isinstance(cls, type) and issubclass(cls, PromptDataset):
        return cls(list(paths), tokenizer, data, processor, **kwargs)
    encoder = PromptEncoder(tokenizer, dict(data.apply_chat_template_kwargs), kwargs["tools"])
    return build_custom_prompts(cls, paths, encoder, data, processor, max_samples)


def _build_sampler(config: DovetailConfig, dataset: Prompts, **settings: Any) -> PromptSampler:
    sampler, sizes = config.data.sampler, _source_sizes(dataset)
    if sampler.class_path is None:
        return PromptSampler(sizes, **settings)
    name = sampler.class_name or "Sampler"
    cls = load_user_object(sampler.class_path, name, key="data.sampler.class_path")
    if isinstance(cls, type) and issubclass(cls, PromptSampler):
        return cls(sizes, **settings)
    if not (isinstance(cls, type) and hasattr(cls, "__iter__")):
        raise DataError(
            f"data.sampler: {name} of {sampler.class_path} is no sampler; inherit from torch.utils.data.Sampler and "
            "give row numbers in __iter__, or from dovetail.data.sampler.PromptSampler and override epoch_order."
        )
    return TorchOrder(sizes, sampler=make_torch_sampler(cls, dataset, config.data), **settings)


def _source_sizes(dataset: Prompts) -> list[int]:
    return dataset.source_sizes if isinstance(dataset, _FOLLOWED) else [len(dataset)]
