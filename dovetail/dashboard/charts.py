"""Which metrics belong together on the overview, and the points to draw. Names are those of docs/trainer.md."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from dovetail.dashboard.run_files import MetricsTable


def smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """Exponential average without the pull of a start at zero; 0 leaves the values as they are, 0.99 is very smooth."""
    if weight <= 0:
        return values
    averages = np.empty(len(values))
    total, norm = 0.0, 0.0
    for index, value in enumerate(values.tolist()):
        total = total * weight + value * (1 - weight)
        norm = norm * weight + (1 - weight)
        averages[index] = total / norm
    return averages


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Indices of at most `most` points: of every stretch its lowest and its highest, so that no spike is lost."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, max(1, (most - 2) // 2) + 1).astype(int)
    chosen = {0, count - 1}
    for start, stop in itertools.pairwise(edges.tolist()):
        part = values[start:stop]
        chosen.add(start + int(part.argmin()))
        chosen.add(start + int(part.argmax()))
    return np.array(sorted(chosen))


def spaced(count: int, most: int) -> np.ndarray:
    """At most `most` indices of `count`, evenly spaced, the first and the last among them."""
    return np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, most).astype(int))


def binned_means(steps: np.ndarray, columns: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Means over at most `most` runs of neighbouring steps: the first step of each, and `[columns, runs]`."""
    count = len(steps)
    if count <= most:
        return steps, columns
    edges = np.linspace(0, count, most + 1).astype(int)
    means = np.add.reduceat(columns, edges[:-1], axis=1) / np.diff(edges)
    return steps[edges[:-1]], means


def rounded(values: np.ndarray) -> list[float]:
    """Finite numbers for JSON: six digits are enough for an eye."""
    return [float(f"{value:.6g}") for value in values.tolist()]


@dataclass(frozen=True)
class Chart:
    """A chart shows the first pattern that finds something, and all of `also`. `share`: the values lie in 0..1."""

    key: str
    title: str
    first_of: tuple[str, ...]
    also: tuple[str, ...] = ()
    share: bool = False
    absent: str = ""
    optional: bool = False
    """Of runs of a certain kind only: others do not miss it."""


# What other methods record: fine-tuning, preferences, reward models, distillation.
_OTHER_METHODS = (
    Chart("loss", "Loss", ("train/loss",), ("val/loss",), optional=True),
    Chart("distill_kl", "Divergence from the teacher (nats per token)", ("distill/kl",), optional=True),
    Chart(
        "distill_top_k",
        "The teacher's top-k tokens: mass, and overlap with the student's (share)",
        ("distill/overlap_ratio",),
        ("distill/teacher_mass", "distill/student_mass"),
        share=True,
        optional=True,
    ),
    Chart(
        "preferences",
        "Pairs in order (share)",
        ("train/rewards/accuracies", "train/accuracy"),
        ("val/rewards/accuracies", "val/accuracy"),
        share=True,
        optional=True,
    ),
    Chart(
        "margins",
        "Margin between chosen and rejected",
        ("train/rewards/margins", "train/margin"),
        ("val/rewards/margins", "val/margin"),
        optional=True,
    ),
    Chart(
        "logps", "Log-probs of chosen and rejected", ("train/logps/chosen",), ("train/logps/rejected",), optional=True
    ),
)

VALIDATION_TRUNCATED = "val-aux/response_length/clip_ratio"
OVERVIEW = (
    *_OTHER_METHODS,
    Chart("reward", "Reward", ("critic/score/mean", "reward/score/mean", "critic/rewards/mean")),
    Chart("accuracy", "Accuracy", ("reward/acc/mean",), ("val-core/*/mean@*",), share=True),
    Chart(
        "length",
        "Response length (tokens)",
        ("response_length/mean",),
        ("response_length/max", "val-aux/response_length/mean"),
    ),
    Chart(
        "truncated", "Truncated responses (share)", ("response_length/clip_ratio",), (VALIDATION_TRUNCATED,), share=True
    ),
    Chart(
        "entropy",
        "Entropy of the policy",
        ("actor/entropy", "actor/entropy_loss"),
        absent="with one optimizer step a batch, set actor_rollout_ref.actor.calculate_entropy=True",
    ),
    Chart("kl", "KL divergence", ("actor/kl_loss", "actor/reward_kl_penalty", "critic/kl"), ("actor/ppo_kl",)),
    Chart("grad_norm", "Gradient norm", ("actor/grad_norm",), ("critic/grad_norm",)),
    Chart("clip", "Clip fraction", ("actor/pg_clipfrac",), share=True),
    Chart(
        "mismatch",
        "Engine against trainer (KL)",
        ("rollout_corr/k3_kl", "rollout_corr/kl", "rollout_corr/probs_diff_mean"),
    ),
)

OVERVIEW += (
    Chart("outcomes", "Outcomes of trajectories (share)", ("outcome/*",), share=True, optional=True),
    Chart("turns", "Turns of a trajectory", ("num_turns/mean",), ("num_turns/max",), share=True, optional=True),
    Chart(
        "tool_calls",
        "Tool calls of a trajectory",
        ("tool_call_counts/mean",),
        ("tool_call_counts/max",),
        share=True,
        optional=True,
    ),
    Chart("tool_failures", "Failed tool calls (share)", ("tool_call_counts/failed_share",), share=True, optional=True),
)

# What only asynchronous runs record; the first chart says whether a run is one.
ASYNC = (
    Chart("staleness", "Staleness of responses (updates)", ("async/staleness/mean",), ("async/staleness/max",)),
    Chart(
        "effective_sample_size",
        "Effective sample size of token ratios",
        ("rollout_corr/eff_sample_size",),
        ("async/effective_sample_size",),
        share=True,
    ),
    Chart(
        "buffer",
        "Groups: finished and waiting, in flight",
        ("async/groups_ready",),
        ("async/groups_running",),
        share=True,
    ),
    Chart("fresh_logprob_diff", "Log-prob difference of fresh tokens", ("async/fresh_logprob_diff",), share=True),
    Chart(
        "weight_sync",
        "Seconds to bring weights to engines",
        ("async/weight_sync_s",),
        ("async/generation_held_s",),
        share=True,
    ),
)


_HEADLINES = (
    ("loss", ("train/loss",)),
    ("validation loss", ("val/loss",)),
    ("pairs in order", ("val/rewards/accuracies", "val/accuracy", "train/rewards/accuracies", "train/accuracy")),
    ("divergence from the teacher", ("distill/kl",)),
    ("reward", ("critic/score/mean", "reward/score/mean")),
    ("response length", ("response_length/mean",)),
    ("tokens/s per device", ("perf/throughput",)),
    ("seconds per step", ("perf/time_per_step",)),
)


def headlines(table: MetricsTable) -> list[dict[str, Any]]:
    """The numbers at the top of page and report: each at its first step and at its last."""
    validated = [name for name in table.names if name.startswith("val-core/") and "/mean@" in name][:2]
    chosen = [(title, next((name for name in names if name in table.names), "")) for title, names in _HEADLINES]
    at = [title for title, _ in chosen].index("reward") + 1
    chosen[at:at] = [(f"validation {name.split('/')[-2]}", name) for name in validated]
    numbers = []
    for title, name in chosen:
        steps, values = table.finite(name)
        if len(values):
            first, last = float(values[0]), float(values[-1])
            numbers.append({"title": title, "first": first, "last": last, "first_step": int(steps[0])})
    return numbers


def is_missed(chart: Chart, known: list[str]) -> bool:
    """Whether a reader should be told that a run has no numbers for the chart: not of methods that record others, and
    not before the first step."""
    return not chart.optional and bool(known) and "train/loss" not in known


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
