"""What the losses of preference pairs share. Shares: divided by a count of the whole batch, see `aggregate`."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def logistic_loss(margins: Tensor, label_smoothing: float) -> Tensor:
    """-log sigmoid of each margin; `label_smoothing` is the share of pairs taken to be labelled the wrong way round."""
    return -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)


def pair_metrics(
    chosen_rewards: Tensor, rejected_rewards: Tensor, chosen: Tensor, rejected: Tensor, total: float
) -> dict[str, Tensor]:
    """Shares of means over pairs, under the names that TRL gives them."""
    chosen_rewards, rejected_rewards = chosen_rewards.detach(), rejected_rewards.detach()
    return {
        "rewards/chosen": chosen_rewards.sum() / total,
        "rewards/rejected": rejected_rewards.sum() / total,
        "rewards/accuracies": (chosen_rewards > rejected_rewards).float().sum() / total,
        "rewards/margins": (chosen_rewards - rejected_rewards).sum() / total,
        "logps/chosen": chosen.detach().sum() / total,
        "logps/rejected": rejected.detach().sum() / total,
    }
