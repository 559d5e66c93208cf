"""The model shapes that a config points at. A missing folder costs a notice, never the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.config.plan.model_shape import ModelShape, ModelShapeError, read_config_json, shape_from_config
from dovetail.config.root import DovetailConfig


@dataclass(frozen=True)
class Shapes:
    """Shapes by network; None where the run has no such network or its config.json is not here."""

    policy: ModelShape | None = None
    critic: ModelShape | None = None
    reward: ModelShape | None = None
    notices: tuple[str, ...] = ()


def read_shapes(config: DovetailConfig) -> Shapes:
    """Read every `config.json` that the roles of this run need."""
    model, critic, reward = config.actor_rollout_ref.model, config.critic.model, config.reward_model
    notices: list[str] = []
    policy = _read("actor_rollout_ref.model.path", model.config_path, model.override_config, notices)
    value = None
    if config.uses_critic:
        same = critic.config_path == model.config_path and critic.override_config == model.override_config
        value = policy if same else _read("critic.model.path", critic.config_path, critic.override_config, notices)
    score = None
    if reward.enable and reward.model.path:
        score = _read("reward_model.model.path", reward.model.path, reward.model.override_config, notices)
    return Shapes(policy, value, score, tuple(notices))


def _read(key: str, folder: str, changes: dict[str, Any], notices: list[str]) -> ModelShape | None:
    try:
        shape = shape_from_config(_merged(read_config_json(folder), changes))
    except ModelShapeError as error:
        notices.append(f"{key}={folder}: {error} The plan has no memory part for this network.")
        return None
    notices.extend(f"{key}={folder}: {text}" for text in shape.notices)
    return shape


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        nested = merged.get(key)
        merged[key] = _merged(nested, value) if isinstance(nested, dict) and isinstance(value, dict) else value
    return merged
