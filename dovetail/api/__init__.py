"""Training from Python: `dovetail.GRPO(model=..., data=..., reward=...).train()`. See docs/python.md.

Builds the configuration that `dovetail train` builds, and calls the same `run_training`.
"""

from dovetail.api.run import Run
from dovetail.api.trainers import DAPO, DPO, GRPO, PPO, RLOO, SFT, Distill, RewardModel

__all__ = ["DAPO", "DPO", "GRPO", "PPO", "RLOO", "SFT", "Distill", "RewardModel", "Run"]
