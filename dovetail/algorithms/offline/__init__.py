"""Losses of preferences and reward models, a file each: summed log-probs or scores in, one number and metrics out.

`registry` has them as workers run them, by the name in `dpo.loss_type`.
"""

# ruff: noqa: F401 (what is imported here is the public interface)

from __future__ import annotations

from dovetail.algorithms.offline.dpo import dpo_loss
from dovetail.algorithms.offline.ipo import ipo_loss
from dovetail.algorithms.offline.kto import kto_kl, kto_loss
from dovetail.algorithms.offline.orpo import orpo_loss
from dovetail.algorithms.offline.registry import (
    OfflineLoss,
    preference_loss,
    preference_loss_names,
    reward_model_loss,
)
from dovetail.algorithms.offline.reward import reward_loss
from dovetail.algorithms.offline.simpo import simpo_loss
