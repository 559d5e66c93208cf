"""Estimators and losses written for verl's contract are called as verl calls them, and give shares as ours do."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.algorithms import BatchCounts, agg_loss, compute_policy_loss_vanilla, count_batch, masked_mean
from dovetail.algorithms.plugin_calls import as_policy_loss
from dovetail.config.actor import ActorConfig
from dovetail.config.data import DataConfig
from dovetail.config.signatures import missing_arguments, named_arguments
from dovetail.config.view import ConfigView

pytestmark = pytest.mark.unit


def verl_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """As verl's own are written: settings and counts from `config`, metrics as floats over the rows at hand."""
    assert config is not None
    low = config.clip_ratio_low if config.clip_ratio_low is not None else config.clip_ratio
    high = config.clip_ratio_high if config.clip_ratio_high is not None else config.clip_ratio
    ratio = (log_prob - old_log_prob).clamp(-20.0, 20.0).exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(plain, clipped)
    ceiling = -advantages * config.get("clip_ratio_c", 3.0)
    losses = torch.where(advantages < 0, torch.minimum(losses, ceiling), losses)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {"actor/pg_clipfrac": masked_mean((clipped > plain).float(), response_mask).item()}


def old_verl_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """From before verl had counts of the whole mini-batch."""
    return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode), {}


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([4, 1, 3, 0, 2, 4])
    old = -torch.rand(6, 4, generator=generator, dtype=torch.float64)
    return {
        "old_log_prob": old,
        "log_prob": old + 0.4 * torch.randn(6, 4, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(6, 4, generator=generator, dtype=torch.float64),
        "response_mask": (torch.arange(4) < lengths[:, None]).double(),
        "rollout_is_weights": torch.rand(6, 4, generator=generator, dtype=torch.float64),
    }


SETTINGS = {"loss_scale_factor": None, "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}


@pytest.mark.parametrize("loss", ["verl", "old verl, a row at a time"])
def test_a_trajectory_of_several_rows_weighs_as_one_in_a_loss_of_verl(loss: str) -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    token_losses = torch.tensor([1.0, 5.0, 4.0])[:, None].expand(3, 3)
    weights = torch.tensor([0.75, 0.25, 1.0])  # the first two rows are one trajectory
    rows = {"log_prob": -torch.ones(3, 3), "old_log_prob": -torch.ones(3, 3), "response_mask": mask}
    if loss == "verl":
        parts, rows["advantages"] = [slice(0, 3)], -token_losses
    else:
        parts, rows["advantages"] = [slice(row, row + 1) for row in range(3)], token_losses
    loss_fn = as_policy_loss(verl_loss if loss == "verl" else old_verl_loss, ConfigView(ActorConfig()))
    total = sum(
        loss_fn(
            **{name: column[part] for name, column in rows.items()},
            loss_agg_mode="seq-mean-token-mean",
            loss_scale_factor=None,
            counts=BatchCounts(6, 2, 3, 3, weights[part]),
        )[0]
        for part in parts
    )
    # ((3 * 1 + 1 * 5) / 4 + 4) / 2 trajectories
    assert float(total) == pytest.approx(3.0)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("parts", [[6], [2, 4], [1, 1, 1, 1, 1, 1]])
def test_a_loss_of_verl_gives_the_shares_of_ours(mode: str, parts: list[int]) -> None:
    config = ConfigView(ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.28))
    columns = batch()
    counts = count_batch(columns["response_mask"])
    loss_fn = as_policy_loss(verl_loss, config)
    total, clipped, start = 0.0, 0.0, 0
    for size in parts:
        rows = {name: column[start : start + size] for name, column in columns.items()}
        loss, metrics = loss_fn(**rows, counts=counts, loss_agg_mode=mode, loss_selection=None, **SETTINGS)
        total, clipped, start = total + float(loss), clipped + float(metrics["actor/pg_clipfrac"]), start + size
    expected, metrics = compute_policy_loss_vanilla(**columns, loss_agg_mode=mode, **SETTINGS)
    assert total == pytest.approx(float(expected), rel=1e-9)
    assert clipped == pytest.approx(float(metrics["actor/pg_clipfrac"]), rel=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_a_loss_that_asks_for_no_counts_returns_a_mean_over_its_rows_and_becomes_a_share(mode: str) -> None:
    columns = batch()
    counts = count_batch(columns["response_mask"])
    loss_fn = as_policy_loss(old_verl_loss, ConfigView(ActorConfig()))
    parts = [
        loss_fn(
            **{name: column[rows] for name, column in columns.items()}, counts=counts, loss_agg_mode=mode, **SETTINGS
        )[0]
        for rows in (slice(0, 2), slice(2, 3), slice(3, 6))
    ]
    expected, _ = old_verl_loss(*(columns[name] for name in list(columns)[:4]), loss_agg_mode=mode)
    assert float(sum(parts)) == pytest.approx(float(expected), rel=1e-9)


def test_our_losses_are_called_as_before() -> None:
    def mine(log_prob: torch.Tensor, counts: BatchCounts | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
        return log_prob.sum(), {"given": torch.tensor(float(counts is not None))}

    columns = batch()
    _, metrics = as_policy_loss(mine, ConfigView(ActorConfig()))(**columns, counts=BatchCounts(1, 1, 1, 1))
    assert metrics["given"] == 1.0
    ours = as_policy_loss(compute_policy_loss_vanilla, ConfigView(ActorConfig()))
    assert ours(**columns, **SETTINGS)[0] == compute_policy_loss_vanilla(**columns, **SETTINGS)[0]


def test_an_estimator_gets_what_it_names_and_lacks_are_found() -> None:
    def of_verl(token_level_rewards: Any, response_mask: Any, index: Any, config: Any = None, **kwargs: Any) -> Any:
        return index, config, kwargs

    def strict(token_level_rewards: Any, response_mask: Any, index: Any, my_column: Any) -> Any: ...

    uid = np.array(["a"], dtype=object)
    given = {"token_level_rewards": 1, "response_mask": 2, "index": uid, "config": "c", "gamma": 0.9}
    index, config, rest = of_verl(**named_arguments(of_verl, given))
    assert (index is uid, config, rest) == (True, "c", {"gamma": 0.9})
    assert set(named_arguments(strict, given)) == {"token_level_rewards", "response_mask", "index"}
    assert missing_arguments(strict, given) == ["my_column"]
    assert missing_arguments(of_verl, given) == []


def test_a_config_view_reads_like_verls() -> None:
    view = ConfigView(ActorConfig(clip_ratio=0.3), mine=7)
    assert (view.clip_ratio, view["clip_ratio"], view.get("clip_ratio")) == (0.3, 0.3, 0.3)
    assert view.policy_loss.get("loss_mode") == "vanilla"
    assert view.get("no_such_key", 5) == 5
    assert "no_such_key" not in view
    assert view.mine == 7
    assert view.clip_low == 0.3, "properties of the section, too"
    assert dict(view)["ppo_epochs"] == 1
    with pytest.raises(AttributeError, match="ActorConfig has no key 'no_such_key'; read it with get"):
        _ = view.no_such_key
    copy = pickle.loads(pickle.dumps(ConfigView(DataConfig(prompt_key="q"))))
    assert copy.get("prompt_key") == "q"
