"""From configuration to loaders of training and validation prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.config import DovetailConfig
from dovetail.config.user_code import load_user_object
from dovetail.data.custom_dataset import build_custom_prompts
from dovetail.data.encode import PromptEncoder
from dovetail.data.errors import DataError
from dovetail.data.files import needs_ground_truth
from dovetail.data.loader import PromptLoader, Prompts
from dovetail.data.prompts import PromptDataset
from dovetail.data.sampler import PromptSampler
from dovetail.data.torch_sampler import TorchOrder, make_torch_sampler


def build_train_loader(
    config: DovetailConfig, tokenizer: Any, processor: Any = None, *, weights: Sequence[float] | None = None
) -> PromptLoader:
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
        weights=data.train_weights if weights is None else weights,
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
    """Tool schemas of a YAML file: a list of them, or `tools:` with one `tool_schema` each."""
    import yaml

    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"data.tool_config_path={path}: there is no such file.")
    content = yaml.safe_load(file.read_text())
    entries = content.get("tools", []) if isinstance(content, Mapping) else content
    return [entry.get("tool_schema", entry) for entry in entries or []]


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
    return dataset.source_sizes if isinstance(dataset, PromptDataset) else [len(dataset)]
