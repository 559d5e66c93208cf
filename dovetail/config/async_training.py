"""`async_training.*`: training while other devices generate (one step off, or fully asynchronous)."""

from __future__ import annotations

from typing import ClassVar

from dovetail.config.base import Rule, Section, key, unused


class AsyncTrainingConfig(Section):
    """How far generation may run ahead. Read only when `actor_rollout_ref.hybrid_engine` is false."""

    rules: ClassVar[tuple[Rule, ...]] = (unused("generation and training take turns"),)

    staleness_threshold: float = key(0.1, "Share of samples that may come from older weights.", ge=0)
    trigger_parameter_sync_step: int = key(4, "Updates between two transfers of weights.", ge=1)
    require_batches: int = key(1, "Mini-batches that the trainer waits for.", ge=1)
    partial_rollout: bool = key(True, "Interrupt and continue responses when new weights arrive.")
    use_rollout_log_probs: bool = key(True, "Take the engine's log-probs as the old log-probs.")
    compute_prox_log_prob: bool = key(False, "Recompute log-probs with the weights before the update.")
    use_trainer_do_validate: bool = key(False, "Validate on the trainer's devices as well.")
    total_rollout_steps: int | None = key(None, "Prompts generated in all. Null: from the epochs.", ge=1)
