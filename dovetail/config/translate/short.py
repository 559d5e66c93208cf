"""Short names for what every run must say: `model=... data=... reward=...`, on a launch line and from Python.

A run that uses one of them has its open keys fitted to the model, the data and the machine (`dovetail.trainer.choose`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.config.translate.engines import chosen_file
from dovetail.config.user_code import split_address

SHORT_NAMES: dict[str, tuple[str, str]] = {
    "model": ("actor_rollout_ref.model.path", "folder of the policy, or its name on the hub"),
    "data": ("data.train_files", "training prompts: a file, or a list of files"),
    "val_data": ("data.val_files", "validation prompts"),
    "reward": (
        "custom_reward_function.path",
        "`file.py:function` or `pkg://module:function`; the name of a built-in rule; or a reward model, by its folder "
        "or its name on the hub",
    ),
    "engine": ("actor_rollout_ref.rollout.name", "native, vllm or sglang"),
    "output": ("trainer.default_local_dir", "run folder"),
    "steps": ("trainer.total_training_steps", "steps of the run"),
    "lr": ("actor_rollout_ref.actor.optim.lr", "learning rate"),
}
"""Name -> the key that it sets, and what it takes. `reward` sets other keys when it names no function."""


def expand(name: str, value: Any) -> dict[str, Any] | None:
    """The keys that a short name, or the name of one of verl's files, sets; None when `name` is none, or is used as a
    section (`data: {...}`)."""
    if (chosen := chosen_file(name, value)) is not None:
        return chosen
    if name not in SHORT_NAMES or isinstance(value, Mapping):
        return None
    if value is None:
        return {}
    return _reward_keys(value) if name == "reward" else {SHORT_NAMES[name][0]: value}


def reward_entry(text: str) -> dict[str, Any]:
    """One entry of `reward_model.reward_kwargs.rewards`. A built-in rule is a function too: it then needs no
    `data_source` in the rows."""
    path, name = split_address(text)
    if path.endswith((".py", ".pkl")) or path.startswith("pkg://"):
        return {"path": path, "name": name or "compute_score"}
    return {"path": "pkg://dovetail.rewards.registry", "name": "score_by_rule", "kwargs": {"rule": text}}


def _reward_keys(value: Any) -> dict[str, Any]:
    if isinstance(value, list | tuple):
        return {"reward_model.reward_kwargs.rewards": [reward_entry(str(each)) for each in value]}
    text = str(value)
    is_function = text.startswith("pkg://") or ".py" in text or ".pkl" in text
    if not is_function and ("/" in text or (Path(text) / "config.json").is_file()):
        return {"reward_model.enable": True, "reward_model.model.path": text}
    entry = reward_entry(text)
    keys = {"path": entry["path"], "name": entry["name"], "reward_kwargs": entry.get("kwargs")}
    return {f"custom_reward_function.{name}": setting for name, setting in keys.items() if setting is not None}
