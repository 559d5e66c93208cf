"""Staleness and effective sample size of a batch, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from dovetail.trainer.async_metrics import MOST_LAGS, drift_metrics, staleness_metrics

pytestmark = pytest.mark.unit


def test_staleness_is_that_of_the_oldest_trained_token() -> None:
    # Step 6 starts from version 5. Padding is -1, a masked token is not trained on.
    versions = torch.tensor([[2, 3, 5, 5], [5, 5, -1, -1], [0, 4, 4, 4], [1, 1, -1, -1]], dtype=torch.int32)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])
    metrics = staleness_metrics(versions, mask, step=6)
    assert metrics["async/staleness/mean"] == pytest.approx((3 + 0 + 1) / 3)
    assert metrics["async/staleness/max"] == 3
    shares = [metrics[f"async/staleness/lag_{lag}"] for lag in range(MOST_LAGS + 1)]
    assert shares == pytest.approx([4 / 9, 3 / 9, 1 / 9, 1 / 9, 0, 0, 0, 0, 0])


def test_lags_beyond_the_last_are_counted_there() -> None:
    metrics = staleness_metrics(torch.tensor([[0, 1, 12]]), torch.ones(1, 3), step=21)
    assert metrics["async/staleness/lag_8"] == 1.0
    assert metrics["async/staleness/max"] == 20


def test_a_batch_without_trained_tokens_reports_nothing() -> None:
    versions = torch.zeros(2, 3, dtype=torch.int32)
    assert staleness_metrics(versions, torch.zeros(2, 3), step=1) == {}
    assert drift_metrics(torch.zeros(2, 3), torch.zeros(2, 3), versions, torch.zeros(2, 3), step=1) == {}


def test_effective_sample_size_falls_with_unequal_weights() -> None:
    engine = torch.zeros(1, 4)
    versions, mask = torch.tensor([[3, 3, 2, 2]]), torch.tensor([[1, 1, 1, 0]])
    same = drift_metrics(engine, engine, versions, mask, step=4)
    assert same == {"async/effective_sample_size": 1.0, "async/fresh_logprob_diff": 0.0}
    policy = torch.tensor([[0.0, math.log(2.0), math.log(3.0), 50.0]])
    moved = drift_metrics(policy, engine, versions, mask, step=4)
    assert moved["async/effective_sample_size"] == pytest.approx((1 + 2 + 3) ** 2 / (3 * (1 + 4 + 9)))
    assert moved["async/fresh_logprob_diff"] == pytest.approx(math.log(2.0) / 2)
    assert "async/fresh_logprob_diff" not in drift_metrics(policy, engine, versions, mask, step=9)
