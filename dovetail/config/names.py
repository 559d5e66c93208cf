"""Names that other layers register: estimators, policy losses, reward managers, engines, trackers. Lists them only."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.config.wording import did_you_mean

ADV_ESTIMATORS = (
    *("gae", "grpo", "grpo_vectorized", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"),
    *("rloo", "rloo_vectorized", "opo", "gpg", "gdpo", "max_rl"),
    *("optimal_token_baseline", "tir_optimal_token_baseline"),
)
POLICY_LOSSES = (
    *("vanilla", "reinforce", "gspo", "cispo", "geo_mean", "sapo", "gpg", "dro", "clip_cov", "kl_cov"),
    *("dppo_tv", "dppo_kl", "vespo"),
)
REWARD_MANAGERS = ("naive", "dapo", "batch", "prime", "rate_limited")
ENGINES = ("native", "vllm", "sglang")
LOGGERS = ("console", "file", "wandb", "tensorboard", "mlflow", "swanlab", "clearml", "trackio", "jsonl")

_MODULES, _MANAGER = "trainer.import_modules", "reward_model.reward_manager"
REGISTERED: dict[str, tuple[str, ...]] = {
    "algorithm.adv_estimator": ADV_ESTIMATORS,
    "actor_rollout_ref.actor.policy_loss.loss_mode": POLICY_LOSSES,
    _MANAGER: REWARD_MANAGERS,
    "actor_rollout_ref.rollout.name": ENGINES,
    "trainer.logger": LOGGERS,
}
READ_FOR_NAMES = (*REGISTERED, _MODULES, f"{_MANAGER}_module.path")
"""The keys that `unknown_names` looks at."""


def listed(names: tuple[str, ...]) -> str:
    """Words for the documents."""
    return f"{', '.join(names)}; other names need `{_MODULES}`."


def unknown_names(values: Mapping[str, object]) -> dict[str, str]:
    """What is wrong with the registered names among `values`, by key. Values are full keys; missing ones are fine."""
    messages: dict[str, str] = {}
    for key, known in REGISTERED.items():
        if values.get(_MODULES) or (key == _MANAGER and values.get(f"{_MANAGER}_module.path")):
            continue  # what is imported may register others
        written = values.get(key)
        for name in written if isinstance(written, list) else [written]:
            # A number is read as a name, as everywhere.
            if isinstance(name, str | int | float) and not isinstance(name, bool) and str(name) not in known:
                messages[key] = (
                    f"{key}={name} is not built in.{did_you_mean(name, known)} Choose one of {', '.join(known)}, or "
                    f"name the module that registers it in {_MODULES}."
                )
    return messages
