"""The maths: tensors in, tensors out. No Ray, no transformers, no config objects.

Importing this package registers every estimator and loss. Losses and their metrics are shares of a mini-batch: see
`dovetail.algorithms.aggregate`.
"""

# ruff: noqa: F401 (what is imported here is the public interface)

from __future__ import annotations

from dovetail.algorithms.advantages.gdpo import compute_gdpo_outcome_advantage
from dovetail.algorithms.advantages.optimal_token_baseline import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)
from dovetail.algorithms.advantages.outcome import (
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_max_rl_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from dovetail.algorithms.advantages.returns import (
    compute_gae_advantage_return,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)
from dovetail.algorithms.aggregate import LOSS_AGG_MODES, BatchCounts, agg_loss, count_batch
from dovetail.algorithms.kl import (
    KL_PENALTIES,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)
from dovetail.algorithms.losses.cispo import compute_policy_loss_cispo
from dovetail.algorithms.losses.covariance import compute_policy_loss_clip_cov, compute_policy_loss_kl_cov
from dovetail.algorithms.losses.dppo import compute_policy_loss_dppo_kl, compute_policy_loss_dppo_tv
from dovetail.algorithms.losses.geo_mean import compute_policy_loss_geo_mean
from dovetail.algorithms.losses.gspo import compute_policy_loss_gspo
from dovetail.algorithms.losses.policy_gradient import (
    compute_policy_loss_dro,
    compute_policy_loss_gpg,
    compute_policy_loss_reinforce,
)
from dovetail.algorithms.losses.sapo import compute_policy_loss_sapo
from dovetail.algorithms.losses.value import compute_value_loss
from dovetail.algorithms.losses.vanilla import compute_policy_loss_vanilla
from dovetail.algorithms.losses.vespo import compute_policy_loss_vespo
from dovetail.algorithms.masked import (
    compute_response_mask,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)
from dovetail.algorithms.off_policy_metrics import (
    compute_is_metrics,
    compute_offpolicy_metrics,
    compute_probs_diff_metrics,
)
from dovetail.algorithms.overlong import compute_overlong_penalty
from dovetail.algorithms.registry import (
    adv_estimator_names,
    get_adv_estimator_fn,
    get_policy_loss_columns,
    get_policy_loss_fn,
    get_policy_loss_selector,
    policy_loss_names,
    register_adv_est,
    register_policy_loss,
)
from dovetail.algorithms.rollout_correction import (
    RolloutCorrection,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
