"""What a run does with the keys that are set, by the rules that their fields have: one outcome for each key.

`unused`: the key has no effect, which is a notice. `unsupported`: this version cannot run it, which is an error when a
run starts; a plan is made all the same. Whether keys fit each other is asked in `dovetail.config.checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.config.base import ANY, Rule, look_up
from dovetail.config.errors import ConfigError, Notice, Problem
from dovetail.config.fsdp import full_dtype
from dovetail.config.keys import Key, catalogue, find_key
from dovetail.config.root import DovetailConfig
from dovetail.config.tree import prefixes
from dovetail.config.wording import name_some


def unsupported_in_runs(config: DovetailConfig) -> list[Problem]:
    """Every wish of `config` that this version cannot fulfil. Keys that the run does not read are not asked."""
    problems: list[Problem] = []
    for key in catalogue(DovetailConfig).values():
        if not any(rule.outcome == "unsupported" for rule in key.rules):
            continue
        value = look_up(config, "", key.name)
        rule = _outcome(config, key, value)
        if rule is not None and rule.outcome == "unsupported":
            problems.append(
                Problem(key.name, f"{key.name}={value} cannot be run in this version: {rule.words(config, key.name)}.")
            )
    return problems


def refuse_unsupported(config: DovetailConfig) -> None:
    """Raise `ConfigError` with everything that cannot be run."""
    if problems := unsupported_in_runs(config):
        raise ConfigError(problems)


def effect_notices(config: DovetailConfig, values: Mapping[str, Any]) -> list[Notice]:
    """What there is to say about the set keys `values`: one notice for each reason."""
    refused = unsupported_in_runs(config)
    notices = [Notice(problem.key, f"{problem.message} It is planned all the same.") for problem in refused]
    unread: dict[str, list[str]] = {}
    for name, value in values.items():
        key = find_key(DovetailConfig, name)
        # A file that resolves a whole run writes every key: a default asks for nothing.
        if key is None or _is_default(key, name, value):
            continue
        rule = _outcome(config, key, value)
        if rule is not None and rule.outcome == "unused":
            when = "version" if rule.when is None else "run"
            why = rule.words(config, key.name)
            unread.setdefault(f"no effect in this {when}: {why}.", []).append(f"{name}={value}")
    for message, keys in unread.items():
        notices.append(Notice(keys[0].partition("=")[0], f"{name_some(keys)}: {message}"))
    return notices


def is_unused(config: DovetailConfig, name: str) -> bool:
    """Whether this run does not read the key, whatever its value: a rule says so, or its part is switched off."""
    key = find_key(DovetailConfig, name)
    if key is not None and any(rule.outcome == "unused" and rule.applies(config, name, ANY) for rule in key.rules):
        return True
    # Without its network `reward_model` still says how responses are scored.
    switches = [f"{above}.enable" for above in prefixes(name)[1:] if above != "reward_model"]
    return any(switch in catalogue(DovetailConfig) and look_up(config, "", switch) is False for switch in switches)


def _outcome(config: DovetailConfig, key: Key, value: Any) -> Rule | None:
    """The first rule that applies. What has no effect is not refused, so `unused` comes before `unsupported`."""
    applying = [rule for rule in key.rules if _concerns(rule, key, value) and rule.applies(config, key.name, value)]
    return next((rule for rule in applying if rule.outcome == "unused"), applying[0] if applying else None)


def _concerns(rule: Rule, key: Key, value: Any) -> bool:
    return rule.values is not None or rule.outcome == "unused" or not _is_default(key, key.name, value)


def _is_default(key: Key, name: str, value: Any) -> bool:
    if value is None or (key.name == name and value == key.default):
        return True
    # `fp32` and `float32` are one dtype.
    return isinstance(value, str) and isinstance(key.default, str) and full_dtype(value) == full_dtype(key.default)
