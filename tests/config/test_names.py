"""Names and choices that the config lists are those that the algorithms know."""

from __future__ import annotations

from typing import get_args

import pytest

from dovetail.algorithms.kl import KL_PENALTIES
from dovetail.algorithms.registry import adv_estimator_names, policy_loss_names
from dovetail.config import ConfigError, load_config, names
from dovetail.config.actor import KLEstimator

pytestmark = pytest.mark.unit


def test_estimators_and_losses_are_those_of_the_registries() -> None:
    import dovetail.algorithms  # noqa: F401  registers them

    assert set(names.ADV_ESTIMATORS) == set(adv_estimator_names())
    assert set(names.POLICY_LOSSES) == set(policy_loss_names())


def test_kl_estimators_are_those_of_the_algorithms_with_and_without_a_plus() -> None:
    assert set(get_args(KLEstimator)) == {*KL_PENALTIES, *(f"{name}+" for name in KL_PENALTIES)}


def test_an_unknown_tracker_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.logger=consle is not built in; did you mean console\?"):
        load_config(overrides=["trainer.logger=[wandb,consle]"])
    with pytest.raises(ConfigError, match=r"did you mean wandb\?"):
        load_config(overrides=["trainer.logger=vemlp_wandb"])
    own = load_config(overrides=["trainer.logger=[mine]", "trainer.import_modules=[my.module]"])
    assert own.config.trainer.loggers == ("mine",)
