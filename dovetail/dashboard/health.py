"""Rules that find what goes wrong in RL runs without any curve saying so, each with what to try. Reads numbers only.

A rule looks at the last steps (`_RECENT` of them) against the first ones, so a single odd step raises nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from dovetail.dashboard.charts import VALIDATION_TRUNCATED
from dovetail.dashboard.run_files import MetricsTable
from dovetail.dashboard.step_times import PHASE_WORDS, recent_shares

_RECENT = 10
_FIRST = 5

ENTROPY_LEFT, ENTROPY_LOW = 0.25, 0.3
MISMATCH_WARN, MISMATCH_BAD = 0.01, 0.1
TRUNCATED_WARN, TRUNCATED_BAD, TRUNCATED_RISE = 0.2, 0.5, 0.1
FAILED_WARN, FAILED_BAD = 0.01, 0.1
NO_SIGNAL_WARN, NO_SIGNAL_BAD = 0.6, 0.9
CLIP_HIGH = 0.3
POLICY_JUMP = 0.1
SPIKE = 10.0
REWARD_LOSS = 0.3
PHASE_HOG = 0.8
MEMORY_FULL = 0.95


@dataclass(frozen=True)
class Finding:
    """`metric` is what to look at, `severity` how soon."""

    rule: str
    severity: Literal["bad", "warn"]
    title: str
    evidence: str
    what_to_try: str
    metric: str | None = None


@dataclass(frozen=True)
class Facts:
    """What rules look at. `no_signal` is the share of groups without signal in the newest responses."""

    table: MetricsTable
    no_signal: float | None = None
    memory: dict[str, Any] | None = None
    stopped: str | None = None

    def recent(self, name: str) -> np.ndarray:
        return self.table.finite(name)[1][-_RECENT:]

    def first(self, name: str) -> np.ndarray:
        return self.table.finite(name)[1][:_FIRST]

    def enough(self, name: str, count: int = _FIRST + 1) -> bool:
        return len(self.table.finite(name)[1]) >= count


def check_health(facts: Facts) -> list[dict[str, Any]]:
    """Every warning, the worst first."""
    warnings = [warning for rule in RULES for warning in rule(facts)]
    return [asdict(warning) for warning in sorted(warnings, key=lambda warning: warning.severity != "bad")]


def _stopped(facts: Facts) -> Iterator[Finding]:
    if facts.stopped:
        yield Finding(
            "stopped", "bad", "The run has stopped before its last step", facts.stopped,
            "Read its log. Started again with trainer.resume_mode=auto it continues from the last checkpoint.",
        )  # fmt: skip


def _entropy_collapse(facts: Facts) -> Iterator[Finding]:
    name = "actor/entropy"
    if not facts.enough(name):
        return
    first, recent = float(facts.first(name).mean()), float(facts.recent(name).mean())
    if first > 0 and recent < ENTROPY_LEFT * first and recent < ENTROPY_LOW:
        yield Finding(
            "entropy_collapse", "warn", "Entropy has collapsed",
            f"It fell from {first:.3g} to {recent:.3g} nats per token: responses of a group become the same, and "
            "there is nothing left to compare.",
            "If validation still rises this is learning; if it does not: a higher clip_ratio_high (0.28, as in DAPO), "
            "a small entropy_coeff, a lower learning rate, or a higher rollout.temperature.", name,
        )  # fmt: skip


def _no_variance(facts: Facts) -> Iterator[Finding]:
    high, low = facts.recent("critic/score/max"), facts.recent("critic/score/min")
    equal = len(high) >= 3 and len(high) == len(low) and float(np.abs(high - low).max()) < 1e-9
    no_signal = facts.no_signal is not None and facts.no_signal >= NO_SIGNAL_WARN
    if (equal or no_signal) and _solved(facts):
        yield Finding(
            "solved", "warn", "The prompts are solved",
            "The newest responses all got the highest reward of the run, so there is nothing left to learn from them.",
            "Stop here, or continue with harder prompts.", "critic/score/mean",
        )  # fmt: skip
    elif equal:
        yield Finding(
            "no_variance", "bad", "Every response gets the same reward",
            f"In the last {len(high)} steps all rewards were {float(high[-1]):.4g}. No gradient comes from that.",
            "Look at the rollouts: is the answer where the reward function looks for it? Test the function by hand, or "
            "begin with easier prompts.", "critic/score/mean",
        )  # fmt: skip
    elif facts.no_signal is not None and no_signal:
        yield Finding(
            "no_signal", "bad" if facts.no_signal >= NO_SIGNAL_BAD else "warn", "Most groups carry no signal",
            f"In {facts.no_signal:.0%} of the newest groups all responses got the same reward.",
            "Prompts are too hard or too easy: choose others, take more responses per prompt (rollout.n), or let "
            "dynamic sampling replace such groups (algorithm.filter_groups.enable=True).", "critic/score/mean",
        )  # fmt: skip


def _solved(facts: Facts) -> bool:
    """Whether a run that began lower has come to its highest reward with every response."""
    mean, high = facts.table.finite("critic/score/mean")[1], facts.table.finite("critic/score/max")[1]
    return len(mean) > 0 and len(high) > 0 and mean[0] < high.max() <= mean[-1] + 1e-9


def _mismatch(facts: Facts) -> Iterator[Finding]:
    name = "rollout_corr/k3_kl"
    if not facts.enough(name, 3):
        return
    kl = float(np.median(facts.recent(name)))
    if kl > MISMATCH_WARN:
        yield Finding(
            "mismatch", "bad" if kl > MISMATCH_BAD else "warn", "Engine and trainer disagree about probabilities",
            f"KL between them is {kl:.3g} per token in the last steps; with equal arithmetic it is below 0.001.",
            "Compare dtypes of engine and trainer, check that weights arrive (`dovetail doctor`), colour tokens "
            "by log-prob diff in the rollouts; algorithm.rollout_correction.rollout_is=token corrects what "
            "remains.", name,
        )  # fmt: skip


def _truncation(facts: Facts) -> Iterator[Finding]:
    name = "response_length/clip_ratio"
    if not facts.enough(name):
        return
    first, recent = float(facts.first(name).mean()), float(facts.recent(name).mean())
    if recent > TRUNCATED_WARN and recent > first + TRUNCATED_RISE:
        evidence = f"The share of responses cut off rose from {first:.0%} to {recent:.0%}."
    elif recent > TRUNCATED_BAD:
        evidence = f"{recent:.0%} of the responses are cut off before they end."
    else:
        return
    yield Finding(
        "truncation", "bad" if recent > TRUNCATED_BAD and recent > first + TRUNCATED_RISE else "warn",
        "Many responses are truncated", evidence,
        "A larger data.max_response_length; a penalty on overlong responses (reward manager dapo); or "
        "algorithm.filter_truncated=True, so that truncated responses teach nothing.", name,
    )  # fmt: skip


def _rewards_failing(facts: Facts) -> Iterator[Finding]:
    name = "reward/failed_share"
    share = float(facts.recent(name).mean()) if facts.enough(name, 1) else 0.0
    if share > FAILED_WARN:
        yield Finding(
            "rewards_failing", "bad" if share > FAILED_BAD else "warn", "Rewards fail",
            f"{share:.1%} of the responses in the last steps could not be scored (timeout, exception or NaN).",
            "Filter the rollouts by `reward failed` and run the function on such a response; raise its timeout if it "
            "is slow. Above reward_model.max_failed_share the run stops.", name,
        )  # fmt: skip


def _not_finite(facts: Facts) -> Iterator[Finding]:
    bad = [name for name in facts.table.names if np.isinf(facts.table.column(name)).any()]
    skipped = facts.recent("actor/skipped_steps")
    if bad or (len(skipped) and skipped.sum() > 0):
        names = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
        yield Finding(
            "not_finite", "bad", "Numbers that are not finite",
            f"NaN or infinity in {names}." if bad else "Optimizer steps were skipped: their gradient was not finite.",
            "A lower learning rate or grad_clip; bfloat16 instead of float16; look for one enormous advantage in the "
            "rollouts of that step.", bad[0] if bad else "actor/grad_norm",
        )  # fmt: skip


def _spikes(facts: Facts) -> Iterator[Finding]:
    name = "actor/grad_norm"
    _, values = facts.table.finite(name)
    if len(values) < 2 * _RECENT:
        return
    usual, peak = float(np.median(values)), float(facts.recent(name).max())
    if usual > 0 and peak > SPIKE * usual:
        yield Finding(
            "grad_spike", "warn", "The gradient norm has spikes",
            f"{peak:.3g} in the last steps, where {usual:.3g} is usual.",
            "A lower actor.grad_clip or learning rate; look at the responses of that step: very long or very unlikely "
            "ones do this.", name,
        )  # fmt: skip


def _large_steps(facts: Facts) -> Iterator[Finding]:
    clipped, jump = facts.recent("actor/pg_clipfrac"), facts.recent("actor/ppo_kl")
    if len(clipped) >= 3 and float(clipped.mean()) > CLIP_HIGH:
        yield Finding(
            "clipping", "warn", "Most of the update is clipped away",
            f"{float(clipped.mean()):.0%} of the tokens are outside the clip range.",
            "A lower learning rate, fewer ppo_epochs, or fewer mini-batches per step.", "actor/pg_clipfrac",
        )  # fmt: skip
    if len(jump) >= 3 and float(np.abs(jump).mean()) > POLICY_JUMP:
        yield Finding(
            "policy_jump", "warn", "The policy moves far in a step",
            f"KL between the policy before and after a step is {float(np.abs(jump).mean()):.3g}.",
            "A lower learning rate, or fewer optimizer steps per batch.", "actor/ppo_kl",
        )  # fmt: skip


def _falling_reward(facts: Facts) -> Iterator[Finding]:
    name = "critic/score/mean"
    _, values = facts.table.finite(name)
    if len(values) < 4 * _RECENT:
        return
    means = np.convolve(values, np.ones(_RECENT) / _RECENT, mode="valid")
    best, now, first = float(means.max()), float(means[-1]), float(means[0])
    if best > first and now < best - REWARD_LOSS * (best - min(first, float(means.min()))):
        yield Finding(
            "reward_falls", "warn", "The reward has fallen from its best",
            f"Mean of {_RECENT} steps: {now:.3g} now, {best:.3g} at best.",
            "Go back to an earlier checkpoint (trainer.resume_from_path) with a lower learning rate or a KL penalty.",
            name,
        )  # fmt: skip


def _hacking(facts: Facts) -> Iterator[Finding]:
    names = [name for name in facts.table.names if name.startswith("val-core/") and "/mean@" in name]
    steps, rewards = facts.table.finite("critic/score/mean")
    for name in names[:1]:
        val_steps, values = facts.table.finite(name)
        if len(values) < 3 or not len(rewards):
            continue
        best = int(values.argmax())
        if values[-1] < values[best] - 0.05 and (cut := _cut_off_since(facts, int(val_steps[best]))):
            yield Finding(
                "val_truncation", "warn", "Validation falls because responses are cut off",
                f"{name} is {values[-1]:.3g}, it was {values[best]:.3g} at step {val_steps[best]}; meanwhile {cut}.",
                "A larger data.max_response_length, or a penalty on overlong responses (reward manager dapo).",
                VALIDATION_TRUNCATED,
            )  # fmt: skip
            continue
        before, after = rewards[steps <= max(val_steps[best], steps[0])], rewards[-_RECENT:]
        if values[-1] < values[best] - 0.05 and len(before) and after.mean() > before[-_RECENT:].mean() + 0.02:
            yield Finding(
                "hacking", "warn", "Reward rises while validation falls",
                f"{name} is {values[-1]:.3g}, it was {values[best]:.3g} at step {val_steps[best]}; the training reward "
                "has gone up since.",
                "The policy may have found a way to please the reward function without solving the task. Read the "
                "responses with the highest reward (order: best first).", name,
            )  # fmt: skip


def _cut_off_since(facts: Facts, step: int) -> str:
    """How the share of truncated validation responses has risen since a step; empty where it has not."""
    steps, shares = facts.table.finite(VALIDATION_TRUNCATED)
    before = shares[steps == step]
    if not len(before) or shares[-1] <= before[0] + TRUNCATED_RISE:
        return ""
    return (
        f"the share of validation responses that reach the length limit rose from {before[0]:.0%} to {shares[-1]:.0%}"
    )


def _one_phase(facts: Facts) -> Iterator[Finding]:
    shares, _ = recent_shares(facts.table)
    for key, share in shares.items():
        if share >= PHASE_HOG and len(facts.table) >= 3:
            yield Finding(
                "one_phase", "warn", f"{share:.0%} of the time is {PHASE_WORDS.get(key, key)}",
                "Everything else waits for it.", "See the page Time for what makes it faster.", f"timing_s/{key}",
            )  # fmt: skip


def _memory_full(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory or {}
    size = memory.get("device_gib")
    for phase in memory.get("phases", []):
        if size and phase["measured"] and phase["measured"] > MEMORY_FULL * size:
            yield Finding(
                "memory_full", "warn", f"Memory is nearly full in {phase['name']}",
                f"{phase['measured']:.1f} of {size:.1f} GiB.",
                "Smaller micro-batches, gradient checkpointing, or offloading (docs/plan.md).", None,
            )  # fmt: skip


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _stopped, _not_finite, _no_variance, _rewards_failing, _mismatch, _entropy_collapse, _truncation, _hacking,
    _falling_reward, _large_steps, _spikes, _memory_full, _one_phase,
)  # fmt: skip
RULE_TITLES = (
    "the run is alive or finished", "all numbers are finite", "rewards differ within groups",
    "rewards can be computed", "engine and trainer agree", "the policy still explores", "responses end by themselves",
    "validation follows the reward", "the reward does not fall", "updates are small enough", "gradients are steady",
    "memory is not full", "no phase takes all the time",
)  # fmt: skip
