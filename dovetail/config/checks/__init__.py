"""Checks that relate several keys. Every finding names value, rule and fix; all checks run, none stops."""

from __future__ import annotations

from dovetail.config.checks.algorithm import ALGORITHM
from dovetail.config.checks.async_training import ASYNC_TRAINING
from dovetail.config.checks.batches import BATCHES, CUTS
from dovetail.config.checks.examined import Examined
from dovetail.config.checks.methods import DISTILL, OFFLINE
from dovetail.config.checks.networks import NETWORKS
from dovetail.config.checks.parallelism import PARALLELISM
from dovetail.config.checks.rollout import ROLLOUT
from dovetail.config.checks.schedule import SCHEDULE
from dovetail.config.errors import ConfigError, Problem
from dovetail.config.plan.model_shape import ModelShape
from dovetail.config.root import DovetailConfig

CHECKS = (*PARALLELISM, *BATCHES, *ALGORITHM, *ASYNC_TRAINING, *ROLLOUT, *NETWORKS, *DISTILL, *SCHEDULE)
OFFLINE_CHECKS = (*PARALLELISM, *CUTS, *NETWORKS, *SCHEDULE, *OFFLINE)
"""Of methods that train on a data set: there is no engine, no reward and one optimizer step in a batch."""

__all__ = ["CHECKS", "check_config", "refuse_errors"]


def check_config(config: DovetailConfig, shape: ModelShape | None = None) -> list[Problem]:
    """Every finding, errors first. Without the model's shape, what needs it is not checked."""
    run = Examined(config, shape)
    checks = CHECKS if config.generates else OFFLINE_CHECKS
    findings = [finding for check in checks for finding in check(run)]
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.severity != "error")


def refuse_errors(findings: list[Problem]) -> None:
    """Raise `ConfigError` with every error among `findings`."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise ConfigError(errors)
