"""Gradients, losses and metrics do not depend on how a mini-batch is cut into micro-batches or spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dovetail.algorithms import (
    LOSS_AGG_MODES,
    BatchCounts,
    agg_loss,
    compute_value_loss,
    count_batch,
    get_policy_loss_fn,
    get_policy_loss_selector,
    kl_penalty,
    policy_loss_names,
)
from dovetail.algorithms.kl import UNBIASED_KL, unbiased_kl
from dovetail.algorithms.rollout_correction import off_policy_mask

pytestmark = pytest.mark.unit

NUM_ROWS, WIDTH = 12, 9

# How rows are dealt out. The last one is what balancing by token count does: uneven, out of order, several ranks.
SPLITS: dict[str, list[list[int]]] = {
    "micro-batches of 4": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
    "one row at a time": [[row] for row in range(NUM_ROWS)],
    "2 ranks": [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]],
    "3 ranks, dynamic micro-batches": [[7, 0], [3], [11, 1, 2], [5, 4, 6, 8], [10], [9]],
}

SETTINGS: dict[str, Any] = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.28,
    "clip_cov_ratio": 0.2,
    "clip_cov_lb": 0.0,
    "kl_cov_ratio": 0.2,
    "seed": 3,
}


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)

    def normal() -> torch.Tensor:
        return torch.randn(NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([9, 2, 5, 1, 7, 0, 3, 9, 4, 6, 0, 8])  # two rows keep no token
    mask = torch.arange(WIDTH) < lengths.unsqueeze(-1)
    mask[4, 2:4] = False  # a hole, as tool output leaves
    old_log_prob = -normal().abs()
    return {
        "old_log_prob": old_log_prob,
        "log_prob": old_log_prob + 0.5 * normal(),
        "advantages": normal(),
        "response_mask": mask.double(),
        "rollout_is_weights": normal().abs(),
        "values": normal(),
        "returns": normal(),
    }


def _trim(part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Drop columns no row of the part uses, as dynamic batching does."""
    used = part["response_mask"].any(dim=0).nonzero()
    width = int(used.max()) + 1 if len(used) else 1
    return {name: column[:, :width] for name, column in part.items()}


ShareFn = Callable[[dict[str, torch.Tensor], BatchCounts | None], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def _assert_invariant(batch: dict[str, torch.Tensor], leaf: str, share: ShareFn) -> None:
    """`share(rows, counts)` gives (loss, metrics); `leaf` names the column whose gradient is compared."""

    def backward(parts: list[dict[str, torch.Tensor]], counts: BatchCounts | None, rows: list[list[int]]) -> Any:
        gradient = torch.zeros_like(batch[leaf])
        loss_sum, metric_sums = 0.0, {}
        for part, numbers in zip(parts, rows, strict=True):
            values = part[leaf].clone().requires_grad_()
            loss, metrics = share({**part, leaf: values}, counts)
            loss.backward()
            assert values.grad is not None
            gradient[numbers, : values.shape[1]] = values.grad
            loss_sum += loss.item()
            metric_sums = {name: metric_sums.get(name, 0.0) + float(value) for name, value in metrics.items()}
        return gradient, loss_sum, metric_sums

    whole = backward([batch], None, [list(range(NUM_ROWS))])
    assert whole[0].abs().sum() > 0
    for name, rows in SPLITS.items():
        parts = [_trim({key: column[numbers] for key, column in batch.items()}) for numbers in rows]
        counts = sum(count_batch(batch["response_mask"][numbers]) for numbers in rows)
        assert isinstance(counts, BatchCounts)
        cut = backward(parts, counts, rows)
        torch.testing.assert_close(cut[0], whole[0], rtol=1e-12, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}")
        assert cut[1] == pytest.approx(whole[1], rel=1e-12, abs=1e-14), name
        assert cut[2] == pytest.approx(whole[2], rel=1e-12, abs=1e-14), name


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_mode", policy_loss_names())
@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "rollout-corrected"])
def test_policy_loss_does_not_depend_on_the_split(loss_mode: str, loss_agg_mode: str, corrected: bool) -> None:
    batch = _batch()
    if not corrected:
        del batch["rollout_is_weights"]
    loss_fn, select = get_policy_loss_fn(loss_mode), get_policy_loss_selector(loss_mode)
    if select is not None:
        batch["loss_selection"] = select(**batch, **SETTINGS)
        assert batch["loss_selection"].any()
    _assert_invariant(
        batch,
        "log_prob",
        lambda rows, counts: loss_fn(**rows, **SETTINGS, loss_agg_mode=loss_agg_mode, counts=counts),
    )


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo"])
def test_off_policy_masking_does_not_depend_on_the_split(loss_mode: str, loss_agg_mode: str) -> None:
    def share(rows: dict[str, torch.Tensor], counts: BatchCounts | None) -> tuple[torch.Tensor, dict[str, Any]]:
        dropped = off_policy_mask(
            rows["log_prob"], rows["old_log_prob"], rows["advantages"], rows["response_mask"], 0.1
        )
        masked = {**rows, "advantages": rows["advantages"].masked_fill(dropped, 0.0)}
        return get_policy_loss_fn(loss_mode)(**masked, **SETTINGS, loss_agg_mode=loss_agg_mode, counts=counts)

    batch = _batch()
    dropped = off_policy_mask(
        batch["log_prob"], batch["old_log_prob"], batch["advantages"], batch["response_mask"], 0.1
    )
    assert 0 < dropped.sum() < (batch["response_mask"] * (batch["advantages"] < 0)).sum()
    _assert_invariant(batch, "log_prob", share)


@pytest.mark.parametrize("loss_mode", ["clip_cov", "kl_cov"])
def test_selecting_first_equals_selecting_inside_the_loss(loss_mode: str) -> None:
    batch, loss_fn = _batch(), get_policy_loss_fn(loss_mode)
    select = get_policy_loss_selector(loss_mode)
    assert select is not None
    inside, _ = loss_fn(**batch, **SETTINGS)
    before, _ = loss_fn(**batch, **SETTINGS, loss_selection=select(**batch, **SETTINGS))
    assert inside == before


@pytest.mark.parametrize("loss_mode", ["clip_cov", "kl_cov"])
def test_selection_from_part_of_a_mini_batch_is_refused(loss_mode: str) -> None:
    batch = _batch()
    counts = count_batch(batch["response_mask"])
    part = {name: column[:4] for name, column in batch.items()}
    with pytest.raises(ValueError, match="4 rows are part of a mini-batch of 12"):
        get_policy_loss_fn(loss_mode)(**part, **SETTINGS, counts=counts)
    get_policy_loss_fn(loss_mode)(**batch, **SETTINGS, counts=counts)  # these rows are the whole


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
def test_value_loss_does_not_depend_on_the_split(loss_agg_mode: str) -> None:
    def share(rows: dict[str, torch.Tensor], counts: BatchCounts | None) -> tuple[torch.Tensor, dict[str, Any]]:
        loss, clipfrac = compute_value_loss(
            rows["vpreds"], rows["returns"], rows["values"], rows["response_mask"], 0.5, loss_agg_mode, counts=counts
        )
        return loss, {"clipfrac": clipfrac}

    batch = _batch()
    batch["vpreds"] = batch["values"] + batch["log_prob"]
    _assert_invariant(batch, "vpreds", share)


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("penalty", ["kl", "abs", "mse", "low_var_kl", "k1+", "k3+", UNBIASED_KL])
def test_kl_term_does_not_depend_on_the_split(penalty: str, loss_agg_mode: str) -> None:
    def share(rows: dict[str, torch.Tensor], counts: BatchCounts | None) -> tuple[torch.Tensor, dict[str, Any]]:
        log_prob, reference = rows["log_prob"], rows["old_log_prob"]
        if penalty == UNBIASED_KL:
            estimate = unbiased_kl(log_prob, reference, rows["values"])
        else:
            estimate = kl_penalty(log_prob, reference, penalty)
        return agg_loss(estimate, rows["response_mask"], loss_agg_mode, counts=counts), {}

    _assert_invariant(_batch(), "log_prob", share)


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
def test_entropy_term_does_not_depend_on_the_split(loss_agg_mode: str) -> None:
    vocabulary = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def share(rows: dict[str, torch.Tensor], counts: BatchCounts | None) -> tuple[torch.Tensor, dict[str, Any]]:
        entropy = torch.distributions.Categorical(logits=rows["log_prob"].unsqueeze(-1) * vocabulary).entropy()
        return agg_loss(entropy, rows["response_mask"], loss_agg_mode, counts=counts), {}

    _assert_invariant(_batch(), "log_prob", share)


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
def test_a_fixed_horizon_does_not_depend_on_the_split(loss_agg_mode: str) -> None:
    def share(rows: dict[str, torch.Tensor], counts: BatchCounts | None) -> tuple[torch.Tensor, dict[str, Any]]:
        loss = agg_loss(rows["log_prob"], rows["response_mask"], loss_agg_mode, counts=counts, loss_scale_factor=4096)
        return loss, {}

    _assert_invariant(_batch(), "log_prob", share)


def test_a_local_mean_would_not_be_invariant() -> None:
    """The mistake this file guards against: each micro-batch normalised by its own count."""
    batch = _batch()
    whole = agg_loss(batch["log_prob"], batch["response_mask"], "token-mean")
    halves = [
        agg_loss(batch["log_prob"][rows], batch["response_mask"][rows], "token-mean")
        for rows in (slice(0, 6), slice(6, 12))
    ]
    assert abs(float(sum(halves) / 2 - whole)) > 1e-3
