"""Call estimators and policy losses that users register, whether they are written for dovetail or for verl.

A function gets what its signature names. What verl calls `index` is our `uid`, and its `config` is a `ConfigView`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from dovetail.algorithms.aggregate import BatchCounts, count_batch
from dovetail.algorithms.registry import PolicyLossFn
from dovetail.config.signatures import named_arguments
from dovetail.config.view import ConfigView


def as_policy_loss(loss_fn: Callable[..., Any], config: ConfigView) -> PolicyLossFn:
    """The loss as the actor calls it. One that takes `config` follows verl's contract: see `_verl_loss`."""
    if "config" in inspect.signature(loss_fn).parameters:
        return _verl_loss(loss_fn, config)
    return lambda **values: loss_fn(**named_arguments(loss_fn, values))


def _verl_loss(loss_fn: Callable[..., Any], config: ConfigView) -> PolicyLossFn:
    """verl's losses return the loss, and metrics that are means over the rows at hand; ours return shares.

    A loss is a share when it hands `config.global_batch_info` to `agg_loss`. One that never asks for it returns the
    mean over its rows, which becomes a share by the rows' part of the mini-batch.
    """

    parameters = inspect.signature(loss_fn).parameters

    def call(
        *, response_mask: torch.Tensor, counts: BatchCounts | None = None, loss_agg_mode: str, **values: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        local = count_batch(response_mask)
        total = local if counts is None else counts
        view = _LossConfig(config, total, values.get("loss_scale_factor"))
        given = {"response_mask": response_mask, "loss_agg_mode": loss_agg_mode, "config": view, **values}
        loss, metrics = loss_fn(**{name: given[name] for name in parameters if name in given})
        if not view.was_asked_for_counts:
            loss = loss * _part(loss_agg_mode, local, total)
        tokens = local.num_tokens / max(total.num_tokens, 1)
        return loss, {name: tokens * torch.as_tensor(value).detach() for name, value in metrics.items()}

    return call


class _LossConfig(ConfigView):
    """The actor's section with the counts of the mini-batch, as verl's losses find them."""

    def __init__(self, config: ConfigView, counts: BatchCounts, loss_scale_factor: float | None) -> None:
        info: dict[str, Any] = {
            # Gradients are added up over ranks, not averaged: no factor is wanted.
            "dp_size": 1,
            "batch_num_tokens": counts.num_tokens,
            "global_batch_size": counts.num_sequences,
            "loss_scale_factor": loss_scale_factor or float(max(counts.response_width, 1)),
        }
        if counts.row_weights is not None:
            info["row_weights"] = counts.row_weights
        super().__init__(config._section, **{**config._extra, "global_batch_info": info})
        self.was_asked_for_counts = False

    def __getitem__(self, key: str) -> Any:
        if key == "global_batch_info":
            self.was_asked_for_counts = True
        return super().__getitem__(key)


def _part(loss_agg_mode: str, local: BatchCounts, total: BatchCounts) -> float:
    if loss_agg_mode == "token-sum":
        return 1.0
    if loss_agg_mode == "token-mean":
        return local.num_tokens / max(total.num_tokens, 1)
    if loss_agg_mode == "seq-mean-token-mean" and total.row_weights is not None:
        return float(total.row_weights.sum()) / max(total.num_sequences, 1)
    return local.num_sequences / max(total.num_sequences, 1)
