"""KTO (Ethayarajh et al. 2024): responses labelled good or bad one by one, against a KL baseline of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.algorithms.masked import masked_sum


def kto_kl(mismatched: Tensor, ref_mismatched: Tensor, *, num_rows: float | None = None) -> Tensor:
    """Share of the KL estimate before `kto_loss` clamps it: mean log-ratio of prompts with other prompts' responses.

    Summed log-probs of prompt i with the response of another row. It has no gradient.
    """
    return (mismatched - ref_mismatched).detach().sum() / (num_rows or len(mismatched))


def kto_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    desirable: Tensor,
    kl: Tensor | float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    num_desirable: float | None = None,
    num_undesirable: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Share of the loss, and of metrics, from summed log-probs; `kl` is that of the whole batch, held at 0 or above.

    weight * (1 - sigmoid(beta * (log-ratio - kl))) of desirable rows, with the sign turned of the others.
    """
    desirable = desirable.bool()
    good = num_desirable if num_desirable is not None else int(desirable.sum())
    bad = num_undesirable if num_undesirable is not None else int((~desirable).sum())
    baseline = kl.clamp(min=0) if isinstance(kl, Tensor) else log_probs.new_full((), max(kl, 0.0))
    ratio = log_probs - ref_log_probs
    sign = torch.where(desirable, 1.0, -1.0)
    weight = torch.where(desirable, desirable_weight, undesirable_weight)
    losses = weight * (1 - torch.sigmoid(beta * sign * (ratio - baseline)))
    rewards, log_probs = beta * ratio.detach(), log_probs.detach()

    def shares(values: Tensor) -> tuple[Tensor, Tensor]:
        return masked_sum(values, desirable) / max(good, 1), masked_sum(values, ~desirable) / max(bad, 1)

    chosen, rejected = shares(rewards)
    chosen_log_prob, rejected_log_prob = shares(log_probs)
    return losses.sum() / (good + bad), {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "logps/chosen": chosen_log_prob,
        "logps/rejected": rejected_log_prob,
        # Every row of the batch says the same of it.
        "kl": baseline * len(ratio) / (good + bad),
    }
