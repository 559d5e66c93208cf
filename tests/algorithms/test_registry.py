"""Names find functions, users add their own, mistakes are explained, and the config lists the same names."""

from __future__ import annotations

from enum import Enum
from typing import Any, get_args

import pytest
import torch

from dovetail.algorithms import (
    adv_estimator_names,
    agg_loss,
    compute_grpo_outcome_advantage,
    compute_response_mask,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    get_policy_loss_selector,
    masked_mean,
    masked_var,
    masked_whiten,
    policy_loss_names,
    register_adv_est,
    register_policy_loss,
)
from dovetail.algorithms import registry as tables
from dovetail.algorithms.kl import KL_PENALTIES, UNBIASED_KL
from dovetail.config import ConfigError, load_config, names
from dovetail.config.actor import KLEstimator, KLLossEstimator

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _separate_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_ADVANTAGE_ESTIMATORS", "_POLICY_LOSSES", "_SELECTORS"):
        monkeypatch.setattr(tables, table, dict(getattr(tables, table)))


def test_every_estimator_and_loss_of_the_design_is_there() -> None:
    assert {
        "gae", "grpo", "grpo_passk", "rloo", "opo", "gpg", "remax",
        "reinforce_plus_plus", "reinforce_plus_plus_baseline",
    } <= set(adv_estimator_names())  # fmt: skip
    assert {
        "vanilla", "gspo", "cispo", "geo_mean", "sapo", "gpg", "dro", "clip_cov", "kl_cov",
    } <= set(policy_loss_names())  # fmt: skip


def test_an_unknown_name_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(ValueError, match=r"Unknown advantage estimator 'grppo'. Did you mean grpo\?.*gae.*rloo"):
        get_adv_estimator_fn("grppo")
    with pytest.raises(ValueError, match=r"Unknown policy loss 'vanila'. Did you mean vanilla\?.*cispo.*sapo"):
        get_policy_loss_fn("vanila")
    with pytest.raises(ValueError, match="Unknown policy loss"):
        get_policy_loss_selector("nothing like it")
    with pytest.raises(ValueError, match="Known modes: token-mean"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "token_mean")


def test_users_register_their_own_by_name_or_enum() -> None:
    class Mine(Enum):
        ESTIMATOR = "my_estimator"

    @register_adv_est(Mine.ESTIMATOR)
    def estimator(token_level_rewards: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return token_level_rewards, token_level_rewards

    def select(*_: Any, **__: Any) -> torch.Tensor:
        return torch.ones(1, 1, dtype=torch.bool)

    @register_policy_loss("my_loss", select=select)
    def loss(*_: Any, **__: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.zeros(()), {}

    assert get_adv_estimator_fn("my_estimator") is get_adv_estimator_fn(Mine.ESTIMATOR) is estimator
    assert get_policy_loss_fn("my_loss") is loss
    assert get_policy_loss_selector("my_loss") is select


def test_a_taken_name_is_refused() -> None:
    register_adv_est("grpo")(compute_grpo_outcome_advantage)  # the same function again does no harm
    with pytest.raises(ValueError, match="'grpo' is already compute_grpo_outcome_advantage"):
        register_adv_est("grpo")(lambda: None)


def test_only_losses_that_compare_rows_have_a_selector() -> None:
    assert {name for name in policy_loss_names() if get_policy_loss_selector(name)} == {"clip_cov", "kl_cov"}


@pytest.mark.parametrize("name", adv_estimator_names())
def test_estimators_ignore_settings_of_others(name: str) -> None:
    columns = {
        "token_level_rewards": torch.eye(4),
        "response_mask": torch.ones(4, 4),
        "uid": [0, 0, 1, 1],
        "values": torch.zeros(4, 4),
        "reward_baselines": torch.zeros(4),
        "old_log_probs": torch.zeros(4, 4),
        "sum_pi_squared": torch.zeros(4, 4),
        "gamma": 0.9,
        "lam": 0.9,
        "norm_adv_by_std_in_grpo": False,
        "some_users_setting": 1,
    }
    get_adv_estimator_fn(name)(**columns)


def test_masked_statistics_by_hand() -> None:
    values, mask = torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([1, 1, 0])
    assert masked_mean(values, mask).item() == 2.0
    assert masked_var(values, mask).item() == 2.0
    assert masked_var(values, mask, unbiased=False).item() == 1.0
    assert masked_whiten(values, mask)[:2].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert masked_whiten(values, mask, shift_mean=False)[:2].tolist() == pytest.approx([2 - 0.5**0.5, 2 + 0.5**0.5])
    assert masked_mean(values, torch.zeros(3)).item() == 0.0
    assert masked_var(values, torch.tensor([1, 0, 0])).item() == 0.0


def test_the_response_mask_is_the_right_end_of_the_attention_mask() -> None:
    attention_mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    assert compute_response_mask(torch.zeros(2, 2), attention_mask).tolist() == [[1, 0], [0, 0]]
    assert compute_response_mask(torch.zeros(2, 0), attention_mask).shape == (2, 0)


def test_estimators_and_losses_are_those_of_the_registries() -> None:
    assert set(names.ADV_ESTIMATORS) == set(adv_estimator_names())
    assert set(names.POLICY_LOSSES) == set(policy_loss_names())


def test_kl_estimators_are_those_of_the_algorithms_with_and_without_a_plus() -> None:
    assert set(get_args(KLEstimator)) == {*KL_PENALTIES, *(f"{name}+" for name in KL_PENALTIES)}
    assert set(get_args(KLLossEstimator)) == {*get_args(KLEstimator), UNBIASED_KL}


def test_an_unknown_tracker_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.logger=consle is not built in\. Did you mean console\?"):
        load_config(overrides=["trainer.logger=[wandb,consle]"])
    with pytest.raises(ConfigError, match=r"Did you mean wandb\?"):
        load_config(overrides=["trainer.logger=vemlp_wandb"])
    own = load_config(overrides=["trainer.logger=[mine]", "trainer.import_modules=[my.module]"])
    assert own.config.trainer.loggers == ("mine",)
