"""Names that other layers register: estimators, policy losses, reward managers, engines. The config only lists them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

ADV_ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "gdpo",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)
POLICY_LOSSES = (
    *("vanilla", "reinforce", "gspo", "cispo", "geo_mean", "sapo", "gpg", "dro", "clip_cov", "kl_cov"),
    *("dppo_tv", "dppo_kl"),
)
REWARD_MANAGERS = ("naive", "dapo", "batch", "prime", "rate_limited")
ENGINES = ("native", "vllm", "sglang")

_MANAGER = "reward_model.reward_manager"

REGISTERED: dict[str, tuple[str, ...]] = {
    "algorithm.adv_estimator": ADV_ESTIMATORS,
    "actor_rollout_ref.actor.policy_loss.loss_mode": POLICY_LOSSES,
    _MANAGER: REWARD_MANAGERS,
    "actor_rollout_ref.rollout.name": ENGINES,
}


def unknown_names(values: Mapping[str, object]) -> dict[str, str]:
    """What is wrong with the registered names among `values`, by key. Values are full keys; missing ones are fine."""
    if values.get("trainer.import_modules"):
        return {}
    messages: dict[str, str] = {}
    for key in REGISTERED:
        own_module = key == _MANAGER and values.get("reward_model.reward_manager_module.path")
        value = values.get(key)
        # A number is read as a name, as everywhere.
        is_name = isinstance(value, str | int | float) and not isinstance(value, bool)
        if is_name and not own_module and (message := unknown_name(key, str(value))) is not None:
            messages[key] = message
    return messages


def unknown_name(key: str, value: str) -> str | None:
    """What is wrong with a name that is not built in, or None. Call it only when nothing else can register names."""
    known = REGISTERED[key]
    if value in known:
        return None
    close = difflib.get_close_matches(value, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return (
        f"{key}={value} is not built in; {hint}Choose one of {', '.join(known)}, "
        "or name the module that registers it in trainer.import_modules."
    )
