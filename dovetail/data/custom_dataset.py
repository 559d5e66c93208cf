"""A user's data set (`data.custom_cls`), also one written for verl: its rows get the columns that generation reads.

The class is built as verl builds it, `(data_files, tokenizer, config, processor)`, with a config that has `get`. A row
has `raw_prompt` (messages) or `input_ids`; what is missing beside it is made here. Everything else passes through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.algorithms.plugin_calls import named_arguments
from dovetail.config.data import DataConfig
from dovetail.config.view import ConfigView
from dovetail.data.encode import PromptEncoder, pad_prompt, truncate
from dovetail.data.errors import DataError


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
            ids = self._encoder.encode(_plain(row["raw_prompt"]), where)
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


def _plain(prompt: Any) -> Any:
    """Messages as a list: verl's rows hold them as an array."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt
