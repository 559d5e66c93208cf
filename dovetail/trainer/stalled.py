"""Stop a run that no longer learns anything, so that it does not end as if it had trained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

SKIPPED_STEPS = 3
"""Training steps in a row whose every optimizer step was skipped. The weights are the same before and after them."""
EMPTY_ROUNDS = 20
"""Generation rounds in a row without a single group with signal."""


class TrainingStalled(RuntimeError):
    """The run was stopped because nothing is learned; the message says what to change."""


class SkippedSteps:
    """Counts training steps in a row in which a role was not updated at all."""

    def __init__(self, total_steps: int) -> None:
        self._most = min(SKIPPED_STEPS, total_steps)
        self._in_a_row: Counter[str] = Counter()

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise `TrainingStalled` when it has been too many."""
        for role in ("actor", "critic"):
            # The norm is a mean over the optimizer steps that were taken: there is none where all were skipped.
            norm = metrics.get(f"{role}/grad_norm")
            all_skipped = bool(metrics.get(f"{role}/skipped_steps")) and norm is not None and math.isnan(norm)
            self._in_a_row[role] = self._in_a_row[role] + 1 if all_skipped else 0
            if self._in_a_row[role] >= self._most:
                raise TrainingStalled(
                    f"step {step}: every optimizer step of the {role} was skipped in the last {self._in_a_row[role]} "
                    f"steps, because its gradients were NaN or infinite ({role}/lr={metrics.get(f'{role}/lr', 0):g}); "
                    "nothing is learned any more. Lower the learning rate, look at rewards and log-probs of the last "
                    "steps, and go on from a checkpoint before them."
                )


def no_signal(step: int, rounds: int, num_groups: int, metric: str | None) -> TrainingStalled:
    """What to raise when dynamic sampling without a limit finds nothing to train on."""
    return TrainingStalled(
        f"step {step}: {rounds} generation rounds in a row ({num_groups} groups) had no group whose answers differ in "
        f"{metric or 'score'}, so dynamic sampling would go on for ever: the prompts are solved, out of reach, or "
        "scored alike. Give other prompts, or set algorithm.filter_groups.max_num_gen_batches to train on them anyway."
    )
