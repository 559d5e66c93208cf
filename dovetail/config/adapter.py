"""The adapter that `lora_adapter_path` names: what PEFT's adapter_config.json says of it. Reads no weights."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.config.errors import Notice, Problem
from dovetail.config.hub import HubError, fetch_file, fetch_model, is_hub_name
from dovetail.config.keys import catalogue
from dovetail.config.model import ModelConfig
from dovetail.config.root import DovetailConfig

ADAPTER_WEIGHTS, ADAPTER_SETTINGS = "adapter_model.safetensors", "adapter_config.json"
"""The files of an adapter's folder."""
ADAPTER_PREFIX = "base_model.model."
"""Before the names of its tensors, which are otherwise those of the model."""

_MODELS = ("actor_rollout_ref.model", "critic.model")
_MERGE = "merge the adapter into the model (peft: merge_and_unload), and give that folder as model.path"

# Fields that say nothing about what the adapter computes, or are read below. Any other must be unset: PEFT adds fields
# for new kinds of adapters.
_HARMLESS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora", "bias", "fan_in_fan_out",
    "modules_to_save", "init_lora_weights", "megatron_core", "qalora_group_size",
}  # fmt: skip
# How it began. Others (pissa, olora, loftq) changed the model's own weights, too.
_INITS = (True, False, None, "gaussian", "orthogonal")


class AdapterError(ValueError):
    """A folder that is no adapter this version can continue; the message names it and the way out."""


def adapter_folder(model: ModelConfig) -> Path | None:
    """The folder of the adapter that training starts from; one on the hub is downloaded. None: fresh adapters."""
    path = model.lora_adapter_path
    if path is None:
        return None
    return fetch_model(path, weights=True) if is_hub_name(path) else Path(path)


def read_adapter(path: str) -> dict[str, Any]:
    """The keys of a model's section that the adapter in this folder decides, with its values."""
    file = Path(os.path.expanduser(path)) / ADAPTER_SETTINGS  # Path's own raises for a user who does not exist
    try:
        file = fetch_file(path, ADAPTER_SETTINGS) if is_hub_name(path) else file
        raw = json.loads(file.read_text(encoding="utf-8"))
    except HubError as error:
        raise AdapterError(str(error)) from error
    except OSError as error:
        raise AdapterError(
            f"{file} cannot be read ({error.strerror}); give a folder that `dovetail export --adapter` or PEFT's "
            "save_pretrained has written."
        ) from error
    except ValueError as error:
        raise AdapterError(f"{file} is not valid JSON ({error}); export or download the adapter again.") from error
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        kind = raw.get("peft_type") if isinstance(raw, dict) else type(raw).__name__
        raise AdapterError(f"{file} has peft_type={kind}, and only LORA is trained here; {_MERGE}.")
    _refuse_other_kinds(raw, file)
    rank, alpha, targets = raw.get("r"), raw.get("lora_alpha"), raw.get("target_modules")
    if not (isinstance(rank, int) and isinstance(alpha, int | float) and rank > 0 and alpha > 0 and targets):
        # verl's merger writes an alpha of 0 where a checkpoint does not say it.
        raise AdapterError(
            f"{file} has r={rank}, lora_alpha={alpha} and target_modules={targets}; it needs the rank and the alpha "
            "that the adapter was trained with, both above 0, and the names of its layers: write them into the file."
        )
    # Its scale is alpha / sqrt(rank): the same as of plain LoRA with this alpha.
    scale = math.sqrt(rank) if raw.get("use_rslora") else 1
    return {
        "lora_rank": rank,
        "lora_alpha": alpha * scale,
        "target_modules": targets,
        "exclude_modules": raw.get("exclude_modules") or None,
    }


def _refuse_other_kinds(raw: dict[str, Any], file: Path) -> None:
    wrong = [name for name, value in raw.items() if value and name not in _HARMLESS]
    wrong += [] if raw.get("bias") in ("none", None) else ["bias"]
    wrong += [] if raw.get("init_lora_weights") in _INITS else ["init_lora_weights"]
    wrong += ["modules_to_save"] if set(raw.get("modules_to_save") or ()) - {"score", "classifier"} else []
    if wrong:
        shown = ", ".join(f"{name}={raw.get(name)!r}"[:120] for name in wrong)
        raise AdapterError(f"{file} has {shown}, and only plain LoRA is continued here; {_MERGE}.")


def fill_adapters(leaves: dict[str, Any]) -> list[Notice]:
    """Put the adapters' own rank, alpha and layers into the keys that nobody set. A folder that cannot be read leaves
    them as they are: `adapter_problems` says so before a run starts.

    A value that is a key's default counts as not set, as elsewhere: files of whole configurations have every key.
    """
    notices = []
    for section in _MODELS:
        path = leaves.get(f"{section}.lora_adapter_path")
        if not isinstance(path, str):
            continue
        try:
            own = read_adapter(path)
        except AdapterError:
            continue
        for name, value in own.items():
            key = f"{section}.{name}"
            given, default = leaves.get(key), catalogue(DovetailConfig)[key].default
            if given is not None and given == default and not _same(given, value) and name != "lora_rank":
                notices.append(Notice(key, f"{key}={given} is the default; the adapter in {path} has its own."))
            if given is None or given == default:
                leaves[key] = value
    return notices


def adapter_problems(section: str, model: ModelConfig) -> Iterator[Problem]:
    """What is wrong with the adapter of a model's section: its files, or keys that say something else."""
    path = model.lora_adapter_path
    if path is None:
        return
    key = f"{section}.lora_adapter_path"
    try:
        own = read_adapter(path)
    except AdapterError as error:
        yield Problem(key, f"{key}: {error}")
        return
    folder = Path(path)
    if not is_hub_name(path) and not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        why = (
            "only adapter_model.bin, a pickle, which may run code when it is read; load it once with peft and "
            "save_pretrained() to convert it"
            if pickled
            else "no weights; export or download it again"
        )
        yield Problem(key, f"{key}={path} has no {ADAPTER_WEIGHTS}: it has {why}.")
    for name in ("lora_rank", "lora_alpha"):
        if not _same(given := getattr(model, name), own[name]):
            yield Problem(
                f"{section}.{name}",
                f"{section}.{name}={given:g}, and the adapter that training continues has {own[name]:g} "
                f"({key}={path}); take {section}.{name} out.",
            )


def _same(given: Any, own: Any) -> bool:
    if isinstance(given, list) and isinstance(own, list):
        return set(given) == set(own)
    return given == own
