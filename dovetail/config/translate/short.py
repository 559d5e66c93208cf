"""Short names for what every run must say: `model=... data=... reward=...`, on a launch line and from Python.

A run that uses one of them has its open keys fitted to the model, the data and the machine (`dovetail.trainer.choose`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """The keys that a short name sets; None when `name` is none, or is used as a section (`data: {...}`)."""
    if name not in SHORT_NAMES or isinstance(value, Mapping):
        return None
    if value is None:
        return {}
    return _reward_keys(value) if name == "reward" else {SHORT_NAMES[name][0]: value}


def reward_entry(text: str) -> dict[str, str]:
    """One entry of `reward_model.reward_kwargs.rewards`: a function by path and name, or a built-in rule."""
    path, _, name = text.rpartition(":")
    is_function = path.endswith((".py", ".pkl")) or (path.startswith("pkg://") and "/" not in name)
    if is_function:
        return {"path": path, "name": name}
    if text.endswith((".py", ".pkl")) or text.startswith("pkg://"):
        return {"path": text, "name": "compute_score"}
    return {"rule": text}


def _reward_keys(value: Any) -> dict[str, Any]:
    if isinstance(value, list | tuple):
        return {"reward_model.reward_kwargs.rewards": [reward_entry(str(each)) for each in value]}
    entry = reward_entry(str(value))
    if "path" in entry:
        return {"custom_reward_function.path": entry["path"], "custom_reward_function.name": entry["name"]}
    if "/" in entry["rule"] or entry["rule"].startswith(("~", ".")):
        return {"reward_model.enable": True, "reward_model.model.path": entry["rule"]}
    return {"reward_model.reward_kwargs.rewards": [entry]}
