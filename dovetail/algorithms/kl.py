"""Per-token estimates of KL(policy, reference) from the log-probs of the sampled tokens, and their use in rewards.

http://joschu.net/blog/kl-approx.html names them k1, k2, k3. The exact divergence ("full") needs the distribution over
the whole vocabulary, which is not kept, and is refused. The coefficient of the penalty in rewards is constant, or
steered to a target; its value is checkpoint state.
"""

from __future__ import annotations

import torch

from dovetail.algorithms.masked import at_least_float32, masked_mean
from dovetail.config.algorithm import KLControlConfig


class FixedKLController:
    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to do: the coefficient is fixed."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class AdaptiveKLController(FixedKLController):
    """Raises the coefficient when the KL is above target, lowers it below (https://arxiv.org/abs/1909.08593)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(f"adaptive KL control needs target_kl={target_kl} > 0 and horizon={horizon} > 0.")
        super().__init__(init_kl_coef)
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """`n_steps` counts sequences seen; the relative error is limited to 20% per `horizon` of them.

        One step at most halves the coefficient: with more than 5 `horizon` sequences it would turn negative.
        """
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= max(1.0 + error * n_steps / self.horizon, 0.5)


def get_kl_controller(kl_ctrl: KLControlConfig) -> FixedKLController:
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_coef=kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, target_kl=kl_ctrl.target_kl, horizon=kl_ctrl.horizon)
    raise ValueError(f"algorithm.kl_ctrl.type={kl_ctrl.type!r} is not known; use 'fixed' or 'adaptive'.")


KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
UNBIASED_KL = "k3_unbiased"

# k3 grows like exp; one abandoned token must not dominate the batch.
_MAX_LOG_RATIO = 20.0
_MAX_LOW_VAR_KL = 10.0


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """One estimate per token. A trailing `+` (`k3+`) keeps the value and takes the gradient of k2.

    The gradients of k1 and k3 are not estimates of the gradient of the KL; that of k2 is.
    """
    logprob, ref_logprob = at_least_float32(logprob), at_least_float32(ref_logprob)
    estimate = _estimate(logprob - ref_logprob, kl_penalty.removesuffix("+"))
    if not kl_penalty.endswith("+"):
        return estimate
    k2 = 0.5 * (logprob - ref_logprob).square()
    return estimate.detach() + (k2 - k2.detach())


def unbiased_kl(logprob: torch.Tensor, ref_logprob: torch.Tensor, sampling_logprob: torch.Tensor) -> torch.Tensor:
    """k3 weighted by importance, for tokens that another policy has sampled (DeepSeek-V3.2, arXiv:2512.02556):

        w (exp(-x) - 1 + x),   w = p / p_sampling,   x = log p - log p_ref

    Its mean under the sampling policy is the KL of the policy; so is its gradient, w x grad(log p), that of the KL. The
    gradient is given in that form: as a sum of the two factors' it would cancel to noise for a token with a small p.
    """
    logprob = at_least_float32(logprob)
    fixed = logprob.detach()
    log_ratio = (fixed - at_least_float32(ref_logprob)).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    weight = (fixed - at_least_float32(sampling_logprob)).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    return weight * k3_kl(-log_ratio) + weight * log_ratio * (logprob - fixed)


def k3_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(x) - 1 - x, never negative. `exp(x) - 1` would round away what is left of a small x."""
    return (log_ratio.expm1() - log_ratio).clamp(min=0.0)


@torch.no_grad()
def apply_kl_penalty(
    token_level_scores: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    kl_ctrl: FixedKLController,
    kl_penalty: str = "kl",
) -> tuple[torch.Tensor, dict[str, float]]:
    """Rewards = scores - coefficient x KL on kept tokens; then the controller is updated with this batch's KL.

    The KL reported and fed to the controller is the mean, over rows that keep a token, of each row's token mean.
    """
    estimate = _penalty_on_kept_tokens(old_log_probs, ref_log_prob, response_mask, kl_penalty)
    coefficient = kl_ctrl.value
    token_level_rewards = token_level_scores - coefficient * estimate
    rows = response_mask.bool().any(dim=-1)
    current_kl = masked_mean(masked_mean(estimate, response_mask, dim=-1), rows).item()
    kl_ctrl.update(current_kl=current_kl, n_steps=int(rows.sum()))
    return token_level_rewards, {
        "actor/reward_kl_penalty": current_kl,
        "actor/reward_kl_penalty_coeff": float(coefficient),
    }


def _penalty_on_kept_tokens(
    logprob: torch.Tensor, ref_logprob: torch.Tensor, response_mask: torch.Tensor, name: str
) -> torch.Tensor:
    return torch.where(response_mask.bool(), kl_penalty(logprob, ref_logprob, name), 0.0)


def _estimate(log_ratio: torch.Tensor, name: str) -> torch.Tensor:
    match name:
        case "kl" | "k1":
            return log_ratio
        case "abs":
            return log_ratio.abs()
        case "mse" | "k2":
            return 0.5 * log_ratio.square()
        case "low_var_kl" | "k3":
            inverse = (-log_ratio).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            return k3_kl(inverse).clamp(max=_MAX_LOW_VAR_KL)
        case "full":
            raise ValueError("kl_penalty='full' needs the logits of the whole vocabulary; use 'low_var_kl' or 'k3+'.")
    raise ValueError(f"Unknown kl_penalty {name!r}. Known: {', '.join(KL_PENALTIES)}, each also with a trailing '+'.")
