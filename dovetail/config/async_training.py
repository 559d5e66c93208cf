"""`async_training.*`: training while other devices generate (one step off, or fully asynchronous)."""

from __future__ import annotations

from pydantic import Field

from dovetail.config.base import Section


class AsyncTrainingConfig(Section):
    """How far generation may run ahead. Read only when `actor_rollout_ref.hybrid_engine` is false."""

    staleness_threshold: float = Field(0.1, ge=0, description="Share of samples that may come from older weights.")
    trigger_parameter_sync_step: int = Field(4, ge=1, description="Updates between two transfers of weights.")
    require_batches: int = Field(1, ge=1, description="Mini-batches that the trainer waits for.")
    partial_rollout: bool = Field(True, description="Interrupt and continue answers when new weights arrive.")
    use_rollout_log_probs: bool = Field(True, description="Take the engine's log-probs as the old log-probs.")
    compute_prox_log_prob: bool = Field(False, description="Recompute log-probs with the weights before the update.")
    use_trainer_do_validate: bool = Field(False, description="Validate on the trainer's devices as well.")
    total_rollout_steps: int | None = Field(None, ge=1, description="Prompts generated in all. Null: from the epochs.")
