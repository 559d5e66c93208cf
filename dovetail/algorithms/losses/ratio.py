"""What policy losses share: log-ratios of new to old policy, clip ranges, and the way from token losses to a loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.algorithms.aggregate import BatchCounts, agg_loss, token_share
from dovetail.algorithms.masked import at_least_float32
from dovetail.algorithms.registry import PolicyLossFn, SelectorFn, register_policy_loss

# exp(20) is 5e8: no update should weigh a token more, and exp must not overflow on a token the policy has abandoned.
MAX_LOG_RATIO = 20.0


def masked_log_prob(log_prob: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Log-probs in at least float32, 0 outside the mask: padding may hold -inf, and must not reach a gradient."""
    return torch.where(response_mask.bool(), at_least_float32(log_prob), 0.0)


def masked_log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """log(new / old) of every token, 0 outside the mask. Its negation is a one-sample estimate of KL(old, new)."""
    difference = at_least_float32(log_prob) - at_least_float32(old_log_prob)
    return torch.where(response_mask.bool(), difference, 0.0)


def clip_range(clip_ratio: float, low: float | None, high: float | None) -> tuple[float, float]:
    """How far below and above 1 the ratio may go; `clip_ratio` stands in for a side that is not set."""
    low = clip_ratio if low is None else low
    high = clip_ratio if high is None else high
    if low < 0 or high < 0:
        raise ValueError(f"clip range ({low}, {high}) must not be negative: it is a distance from ratio 1.")
    return low, high


@dataclass(frozen=True)
class Tokens:
    """What every policy loss looks at, all of shape (rows, response width)."""

    old_log_prob: torch.Tensor
    log_prob: torch.Tensor
    advantages: torch.Tensor
    response_mask: torch.Tensor

    @property
    def kept_log_prob(self) -> torch.Tensor:
        return masked_log_prob(self.log_prob, self.response_mask)

    def log_ratio(self, *, limited: bool = False) -> torch.Tensor:
        """See `masked_log_ratio`. `limited`: within +-MAX_LOG_RATIO, so that its exp is finite."""
        log_ratio = masked_log_ratio(self.log_prob, self.old_log_prob, self.response_mask)
        return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) if limited else log_ratio


TokenLosses = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The loss of every token, and metrics of every token, all of shape (rows, response width)."""


def register_token_loss(
    name: str,
    *,
    default_agg_mode: str = "token-mean",
    fixed_agg_mode: str | None = None,
    select: SelectorFn | None = None,
) -> Callable[[Callable[..., TokenLosses]], PolicyLossFn]:
    """Decorator: make a policy loss, with `policy_loss`'s signature, of a function `(tokens, ...) -> TokenLosses`.

    The function gets, by keyword, those settings that it names, and `low` and `high`, the clip range, where it names
    them. `select` is that of `register_policy_loss`; its result arrives as `loss_selection`. A method that is defined
    with one aggregation has `fixed_agg_mode`.
    """

    def decorate(token_loss: Callable[..., TokenLosses]) -> PolicyLossFn:
        known = inspect.signature(token_loss).parameters

        def policy_loss(
            old_log_prob: torch.Tensor,
            log_prob: torch.Tensor,
            advantages: torch.Tensor,
            response_mask: torch.Tensor,
            *,
            loss_agg_mode: str = default_agg_mode,
            counts: BatchCounts | None = None,
            loss_scale_factor: float | None = None,
            rollout_is_weights: torch.Tensor | None = None,
            clip_ratio: float = 0.2,
            clip_ratio_low: float | None = None,
            clip_ratio_high: float | None = None,
            **settings: Any,
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
            if "low" in known:
                settings["low"], settings["high"] = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
            if select is not None and settings.get("loss_selection") is None:
                check_whole_batch(name, response_mask, counts)
                clip = {"clip_ratio": clip_ratio, "clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high}
                settings["loss_selection"] = select(
                    old_log_prob, log_prob, advantages, response_mask, **clip, **settings
                )
            losses, metrics = token_loss(tokens, **{key: value for key, value in settings.items() if key in known})
            # The weight of a token is its probability under the training policy / under the rollout policy.
            if rollout_is_weights is not None:
                losses = losses * rollout_is_weights
            mode = fixed_agg_mode or loss_agg_mode
            loss = agg_loss(losses, response_mask, mode, counts=counts, loss_scale_factor=loss_scale_factor)
            return loss, {
                key: token_share(values.detach().to(losses.dtype), response_mask, counts)
                for key, values in metrics.items()
            }

        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(policy_loss, attribute, getattr(token_loss, attribute))
        settings_read = {*known, *(inspect.signature(select).parameters if select is not None else ())}
        clip = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
        vars(policy_loss)["settings_read"] = settings_read | set(clip if "low" in known else ())
        return register_policy_loss(name, select=select)(policy_loss)

    return decorate


def check_whole_batch(loss_mode: str, response_mask: torch.Tensor, counts: BatchCounts | None) -> None:
    """Refuse to choose tokens from a part of the mini-batch: the choice would depend on how it was cut."""
    if counts is not None and counts.num_rows != response_mask.shape[0]:
        raise ValueError(
            f"{loss_mode}: these {response_mask.shape[0]} rows are part of a mini-batch of {counts.num_rows}; compute "
            f"get_policy_loss_selector({loss_mode!r}) on the whole mini-batch and pass its rows as loss_selection."
        )
