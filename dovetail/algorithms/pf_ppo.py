"""PF-PPO (https://arxiv.org/abs/2409.06957): policy filtration, a batch drawn again by score before the update.

Rewards are more reliable at the ends of their range than in the middle, so rows with large or extreme scores are drawn
more often. Rows only: knows nothing of batches.
"""

from __future__ import annotations

import torch

REWEIGHT_METHODS = ("pow", "max_min", "max_random")


def pf_ppo_weights(scores: torch.Tensor, reweight_method: str = "pow", weight_pow: float = 2.0) -> torch.Tensor:
    """How often each row is drawn, relative to the others.

    `pow`: |score| to the power of `weight_pow`. `max_min`: rows with the largest or the smallest score alone.
    `max_random`: rows with the largest score four times as often as any other.
    """
    match reweight_method:
        case "pow":
            weights = scores.abs().pow(weight_pow)
        case "max_min":
            weights = ((scores == scores.max()) | (scores == scores.min())).float()
        case "max_random":
            weights = torch.where(scores == scores.max(), 0.4, 0.1)
        case _:
            raise ValueError(f"pf_ppo.reweight_method={reweight_method!r} is not one of {', '.join(REWEIGHT_METHODS)}.")
    # Scores that are all 0 leave every row the same chance.
    return weights.float() + 1e-8


def draw_pf_ppo_rows(
    scores: torch.Tensor, drawable: torch.Tensor, *, reweight_method: str, weight_pow: float, seed: int
) -> torch.Tensor:
    """As many row numbers as there are rows, with repetition, from the `drawable` ones. Depends on the seed alone."""
    weights = torch.zeros_like(scores, dtype=torch.float32)
    weights[drawable] = pf_ppo_weights(scores[drawable], reweight_method, weight_pow)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights.cpu(), len(scores), replacement=True, generator=generator)
