"""Checks that relate several keys. Each is a small function that names value, rule and fix; all run, none stops."""

from __future__ import annotations

import inspect

from dovetail.config.checks import algorithm, async_training, batches, lengths, networks, parallelism, rollout, schedule
from dovetail.config.checks.checked import Check, Checked
from dovetail.config.errors import ConfigError, Problem
from dovetail.config.plan.model_shape import ModelShape
from dovetail.config.root import DovetailConfig

# Every public function of these modules is a check.
CHECKS: tuple[Check, ...] = tuple(
    function
    for module in (parallelism, batches, algorithm, async_training, rollout, lengths, networks, schedule)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
)

__all__ = ["CHECKS", "check_config", "refuse_errors"]


def check_config(config: DovetailConfig, shape: ModelShape | None = None) -> list[Problem]:
    """Every finding, errors first. Without the model's shape, what needs it is not checked."""
    run = Checked.of(config, shape)
    findings = [finding for check in CHECKS for finding in check(run)]
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.severity != "error")


def refuse_errors(findings: list[Problem]) -> None:
    """Raise `ConfigError` with every error among `findings`."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise ConfigError(errors)
