"""From configuration to a `RewardRunner`. Fails here, before anything is loaded or trained, when a name is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.config import DovetailConfig
from dovetail.config.user_code import load_user_object
from dovetail.rewards.answers import Decoder
from dovetail.rewards.dispatch import RateLimits
from dovetail.rewards.errors import RewardError
from dovetail.rewards.functions import FunctionSpec
from dovetail.rewards.managers import (
    DAPORewardManager,
    RateLimitedRewardManager,
    RewardManager,
    find_reward_manager,
)
from dovetail.rewards.registry import find_rule
from dovetail.rewards.runner import RewardRunner
from dovetail.rewards.verl_managers import VerlManagerSpec, adapt, is_verl_manager

_REGISTRY = "pkg://dovetail.rewards.registry"
_RUNNER_OPTIONS = ("max_failed_share", "rule_weight", "rm_weight", "rewards")


def build_reward_runner(
    config: DovetailConfig, tokenizer: Decoder, columns: tuple[str, ...] | None = None
) -> RewardRunner:
    """The runner of a run. `columns` are those of its rows, where they are known.

    `reward_model.reward_kwargs` may hold `max_failed_share`, `rule_weight`, `rm_weight` and `rewards` (a weighted
    list); the rest goes to the reward manager.
    """
    section = config.reward_model
    options = {name: section.reward_kwargs[name] for name in _RUNNER_OPTIONS if name in section.reward_kwargs}
    manager_options = {name: value for name, value in section.reward_kwargs.items() if name not in _RUNNER_OPTIONS}
    specs = reward_specs(config)
    kind = _load_manager(config)
    if is_verl_manager(kind):
        manager, spec = adapt(kind, _verl_spec(config, tokenizer, specs, manager_options))
        specs = [spec]
    else:
        manager = _build_manager(config, kind, manager_options)
    limited = isinstance(manager, RateLimitedRewardManager)
    own_timeout = limited and section.timeout is not None
    return RewardRunner(
        specs,
        tokenizer,
        manager=manager,
        num_workers=scoring_processes(config),
        timeout_seconds=section.timeout if own_timeout and section.timeout else section.timeout_seconds,
        timeout_key="reward_model.timeout" if own_timeout else "reward_model.timeout_seconds",
        limits=_rate_limits(config) if limited else None,
        async_calls=section.async_calls,
        max_failed_share=float(options.get("max_failed_share", section.max_failed_share)),
        rule_weight=float(options.get("rule_weight", 1.0)),
        rm_weight=float(options.get("rm_weight", 1.0)),
        reward_fn_key=config.data.reward_fn_key,
        import_modules=config.trainer.import_modules,
        columns=columns,
    )


def reward_specs(config: DovetailConfig) -> list[FunctionSpec]:
    """The functions that score: a weighted list, the user's function, the built-in rules, or none beside a network."""
    section, custom = config.reward_model, config.custom_reward_function
    listed = section.reward_kwargs.get("rewards")
    if listed:
        if not isinstance(listed, (list, tuple)):
            raise RewardError(
                f"reward_model.reward_kwargs.rewards={listed!r} must be a list: [{{rule: gsm8k, weight: 1}}]."
            )
        return [_listed_spec(entry, number) for number, entry in enumerate(listed)]
    if custom.path is not None:
        if (custom.path, custom.name) == (_REGISTRY, "score_by_rule"):
            _check_rule(custom.reward_kwargs["rule"])
        return [FunctionSpec(custom.path, custom.name, dict(custom.reward_kwargs))]
    if section.enable and "rule_weight" not in section.reward_kwargs:
        return []
    sandbox = section.sandbox_fusion
    kwargs = {
        "sandbox_url": sandbox.url,
        "memory_limit_mb": sandbox.memory_limit_mb,
        "code_isolation": section.code_isolation,
        "programs_at_once": max(
            1, sandbox.max_concurrent // (scoring_processes(config) * (1 + other_scoring_nodes(config)))
        ),
        **custom.reward_kwargs,
    }
    return [FunctionSpec(_REGISTRY, "default_compute_score", kwargs, key="reward rules")]


def scoring_processes(config: DovetailConfig) -> int:
    """Scoring processes on each node: over all nodes no more than the remote sandbox takes programs."""
    section = config.reward_model
    if section.sandbox_fusion.url is None:
        return section.num_workers
    return max(1, min(section.num_workers, section.sandbox_fusion.max_concurrent // (1 + other_scoring_nodes(config))))


def other_scoring_nodes(config: DovetailConfig) -> int:
    """Nodes beside the driver's that score, at most: those that train, and those that only generate."""
    if config.reward_model.score_on == "driver_node":
        return 0
    rollout = config.actor_rollout_ref
    return config.trainer.nnodes + (0 if rollout.hybrid_engine else rollout.rollout.nnodes) - 1


def _rate_limits(config: DovetailConfig) -> RateLimits:
    section = config.reward_model
    try:
        return RateLimits(
            section.max_concurrent, section.max_rpm, section.max_tpm, section.estimated_tokens_per_request
        )
    except ValueError as error:
        raise RewardError(str(error)) from None


def _listed_spec(entry: Any, number: int) -> FunctionSpec:
    key = f"reward_model.reward_kwargs.rewards[{number}]"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("weight", 1.0), (int, float)):
        raise RewardError(
            f"{key}={entry!r} must be a mapping with a number as weight, such as {{rule: gsm8k, weight: 1}}."
        )
    unknown = sorted(set(entry) - {"rule", "path", "name", "weight", "kwargs"})
    if unknown or ("rule" in entry) == ("path" in entry):
        wrong = f"has unknown entries {', '.join(unknown)}" if unknown else "needs either rule or path"
        raise RewardError(f"{key}={dict(entry)} {wrong}; use {{rule: gsm8k, weight: 1}} or {{path: f.py, name: f}}.")
    kwargs, weight = dict(entry.get("kwargs", {})), float(entry.get("weight", 1.0))
    if "rule" in entry:
        _check_rule(entry["rule"])
        return FunctionSpec(_REGISTRY, "score_by_rule", {"rule": entry["rule"], **kwargs}, weight, key=key)
    name = entry.get("name", "compute_score")
    if (entry["path"], name) == (_REGISTRY, "score_by_rule"):  # of the short name: reward=[f.py:f, gsm8k]
        _check_rule(kwargs["rule"])
    return FunctionSpec(entry["path"], name, kwargs, weight, key=f"{key}.path")


def _check_rule(name: str) -> None:
    try:
        find_rule(name)
    except ValueError as error:
        raise RewardError(
            f"reward={name}: {error} A function of your own is reward=FILE.py:NAME, a "
            "reward model the path of its folder."
        ) from None


def _load_manager(config: DovetailConfig) -> type:
    section, module = config.reward_model, config.reward_model.reward_manager_module
    if module.path is None:
        return find_reward_manager(section.reward_manager)
    name = module.name or section.reward_manager
    manager = load_user_object(module.path, name, key="reward_model.reward_manager_module.path")
    is_ours = isinstance(manager, type) and issubclass(manager, RewardManager)
    if not is_ours and not is_verl_manager(manager):
        raise RewardError(
            f"{name} of {module.path} must inherit from dovetail.rewards.managers.RewardManager, or be a manager "
            "written for verl: a class with __call__(data, return_dict) or run_single(data)."
        )
    return manager


def _verl_spec(
    config: DovetailConfig, tokenizer: Decoder, specs: list[FunctionSpec], options: dict[str, Any]
) -> VerlManagerSpec:
    module = config.reward_model.reward_manager_module
    if len(specs) != 1 or module.path is None:
        raise RewardError(
            f"a reward manager written for verl takes one reward function, not {len(specs)}; drop "
            "reward_model.reward_kwargs.rewards, or set custom_reward_function.path."
        )
    return VerlManagerSpec(
        path=module.path,
        name=module.name or config.reward_model.reward_manager,
        tokenizer=tokenizer,
        function=specs[0],
        reward_fn_key=config.data.reward_fn_key,
        config=config.model_dump(),
        options=options,
    )


def _build_manager(config: DovetailConfig, manager: type[RewardManager], options: dict[str, Any]) -> RewardManager:
    section = config.reward_model
    buffer = section.overlong_buffer
    if issubclass(manager, DAPORewardManager):
        options = {
            "max_response_length": config.overlong_limit,
            "overlong_buffer_len": buffer.len if buffer.enable else 0,
            "overlong_penalty_factor": buffer.penalty_factor,
            "log_overlong": buffer.log,
            **options,
        }
    try:
        return manager(**options)
    except TypeError as error:
        raise RewardError(
            f"reward_manager={section.reward_manager} does not take reward_model.reward_kwargs={options}: {error}"
        ) from None
