"""Which metrics belong together on the overview, and the points to draw. Names are those of docs/trainer.md."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from dovetail.dashboard.metrics_table import MetricsTable
from dovetail.dashboard.series import rounded, smoothed, spaced, thinned


@dataclass(frozen=True)
class Chart:
    """A chart shows the first pattern that finds something, and all of `also`. `share`: the values lie in 0..1."""

    key: str
    title: str
    first_of: tuple[str, ...]
    also: tuple[str, ...] = ()
    share: bool = False
    absent: str = "not recorded in this run"


OVERVIEW = (
    Chart("reward", "Reward", ("critic/score/mean", "reward/score/mean", "critic/rewards/mean")),
    Chart("accuracy", "Accuracy", ("reward/acc/mean",), ("val-core/*/mean@*",), share=True),
    Chart("length", "Answer length (tokens)", ("response_length/mean",), ("response_length/max",)),
    Chart("truncated", "Truncated answers (share)", ("response_length/clip_ratio",), share=True),
    Chart(
        "entropy",
        "Entropy of the policy",
        ("actor/entropy", "actor/entropy_loss"),
        absent="not computed in this run: one optimizer step a batch needs no pass over the old log-probs, and "
        "actor_rollout_ref.actor.entropy_coeff is 0",
    ),
    Chart(
        "kl",
        "KL divergence",
        ("actor/kl_loss", "actor/reward_kl_penalty", "critic/kl"),
        ("actor/ppo_kl",),
    ),
    Chart("grad_norm", "Gradient norm", ("actor/grad_norm",), ("critic/grad_norm",)),
    Chart("clip", "Clip fraction", ("actor/pg_clipfrac",), share=True),
    Chart(
        "mismatch",
        "Engine against trainer (KL)",
        ("rollout_corr/k3_kl", "rollout_corr/kl", "rollout_corr/probs_diff_mean"),
        absent="not recorded: set actor_rollout_ref.rollout.calculate_log_probs=True to compare the probabilities of "
        "engine and trainer",
    ),
)


def names_of(chart: Chart, known: list[str]) -> list[str]:
    """The metrics of a run that a chart shows."""
    chosen: list[str] = []
    for pattern in chart.first_of:
        chosen = [name for name in known if fnmatchcase(name, pattern)]
        if chosen:
            break
    for pattern in chart.also:
        chosen += [name for name in known if fnmatchcase(name, pattern) and name not in chosen]
    return chosen


def points(
    table: MetricsTable,
    name: str,
    *,
    smoothing: float = 0.0,
    most: int = 600,
    first: int | None = None,
    last: int | None = None,
) -> dict[str, list[float]]:
    """The values themselves (`x`, `y`) and, with `smoothing`, their average (`sx`, `sy`), between two steps."""
    steps, values = table.finite(name)
    average = smoothed(values, smoothing)
    kept = np.ones(len(steps), dtype=bool)
    if first is not None:
        kept &= steps >= first
    if last is not None:
        kept &= steps <= last
    steps, values, average = steps[kept], values[kept], average[kept]
    drawn = thinned(values, most)
    line = {"x": steps[drawn].tolist(), "y": rounded(values[drawn])}
    if smoothing > 0:
        even = spaced(len(steps), most)
        line |= {"sx": steps[even].tolist(), "sy": rounded(average[even])}
    return line
