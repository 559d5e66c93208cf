"""What the console knows about a run (`ConsoleState`), and how it is drawn: as a rich picture, or as one line."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"
REWARD_NAMES = ("critic/score/mean", "reward/score/mean", "critic/rewards/mean")
_HISTORY = 2000
# What a step costs: these do not contain each other.
_STEP_PARTS = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
# Metric -> what a reader calls it. Shown when present, in this order.
_SHOWN = {
    "train/loss": "loss",
    "train/accuracy": "pairs in order",
    "response_length/mean": "response length",
    "response_length/clip_ratio": "truncated share",
    "actor/pg_loss": "policy loss",
    "actor/entropy": "entropy",
    "actor/ppo_kl": "ppo kl",
    "actor/kl_loss": "kl loss",
    "distill/kl": "kl to the teacher",
    "actor/pg_clipfrac": "clip fraction",
    "actor/grad_norm": "grad norm",
    "actor/lr": "learning rate",
    "critic/vf_loss": "value loss",
    "rollout_corr/kl": "engine mismatch (kl)",
    "reward/failed": "failed rewards",
}
_LINE = {
    "train/loss": "loss",
    "train/accuracy": "pairs in order",
    "response_length/mean": "len",
    "distill/kl": "teacher kl",
    "actor/entropy": "entropy",
    "actor/ppo_kl": "kl",
    "actor/grad_norm": "grad",
}
_VALIDATED = {"val-aux/response_length/mean": "val len", "val-aux/response_length/clip_ratio": "val truncated"}
# Phases that contain others: their bar would hide the rest.
_WHOLE = ("step",)
_LABEL = 12


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` blocks. Longer series are averaged into buckets, so that the whole history is seen."""
    series = [value for value in values if math.isfinite(value)]
    if not series or width < 1:
        return ""
    points = _buckets(series, width) if len(series) > width else series
    low, high = min(points), max(points)
    if high == low:
        return _BLOCKS[len(_BLOCKS) // 2] * len(points)
    scale = (len(_BLOCKS) - 1) / (high - low)
    return "".join(_BLOCKS[round((point - low) * scale)] for point in points)


def _buckets(series: Sequence[float], count: int) -> list[float]:
    edges = [len(series) * i // count for i in range(count + 1)]
    return [sum(series[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


@dataclass
class ConsoleState:
    """Updated by the driver, read by the view."""

    title: str
    total_steps: int
    step: int = 0
    clock: Callable[[], float] = time.monotonic
    metrics: dict[str, float] = field(default_factory=dict)
    previous: dict[str, float] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    validation: dict[str, float] = field(default_factory=dict)
    validation_step: int | None = None
    events: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    phase_name: str | None = None
    phase_start: float = 0.0
    waits: str = ""

    def __post_init__(self) -> None:
        self.started = self.step_end = self.phase_start = self.clock()
        self.timed_steps, self.timed_seconds = 0, 0.0

    def phase(self, name: str | None) -> None:
        self.phase_name, self.waits = name, ""
        self.phase_start = self.clock()

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step, self.step_end = step, self.clock()
        validation = {name: value for name, value in metrics.items() if _is_shown(name)}
        if validation:
            validation |= {name: metrics[name] for name in _VALIDATED if name in metrics}
            self.validation, self.validation_step = validation, step
        if any(not name.startswith("val-") for name in metrics):
            self.previous, self.metrics = self.metrics, dict(metrics)
        reward = self.reward
        if reward is not None and any(name in metrics for name in REWARD_NAMES):
            self.rewards.append(reward)
        if "timing_s/step" in metrics:
            self.timed_steps += 1
            self.timed_seconds += sum(metrics.get(name, 0.0) for name in _STEP_PARTS)

    def estimate(self) -> str | None:
        """After the first step: how long the others will take on this machine."""
        left = self.total_steps - self.step
        if self.timed_steps != 1 or left < 1:
            return None
        seconds = self.timed_seconds
        return f"a step takes {seconds:.1f} s; time left: {_about(seconds * left)} ({left} step{'s' * (left != 1)})"

    def event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        if kind == "resume":
            self.step = step
        # Of a validation the scores that count; the rest is in the files.
        core = {name.removeprefix("val-core/"): value for name, value in facts.items() if _is_shown(name)}
        details = ", ".join(f"{name} {_short(value)}" for name, value in (core or facts).items())
        self.events.append(f"step {step}: {kind.replace('_', ' ')}" + (f" ({details})" if details else ""))

    @property
    def reward(self) -> float | None:
        """Mean reward of the last step."""
        return next((self.metrics[name] for name in REWARD_NAMES if name in self.metrics), None)

    def seconds_left(self, now: float) -> float | None:
        """From the mean time of the steps of this process; starting up and the first validation come once."""
        if self.timed_steps < 1:
            return None
        expected = self.timed_seconds / self.timed_steps * (self.total_steps - self.step)
        return max(expected - (now - self.step_end), 0.0)


def _about(seconds: float) -> str:
    if seconds < 90:
        return f"about {seconds:.0f} seconds"
    return f"about {seconds / 60:.0f} minutes" if seconds < 5400 else f"about {seconds / 3600:.1f} hours"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_shown(name: str) -> bool:
    """The scores that count, under our names: `best@4`, not verl's `best@4/mean` beside it."""
    return name.startswith("val-core/") and "@" in name.rpartition("/")[2]


def draw(state: ConsoleState, now: float, width: int) -> RenderableType:
    """The picture at this moment, for a terminal of `width` columns."""
    inner = max(40, min(width, 110) - 4)
    rows: list[RenderableType] = [_steps(state, inner), _phase(state, now, inner)]
    if state.rewards:
        rows.append(_reward(state, inner))
    if state.validation:
        # The step comes first: a long name of a data source leaves no room for what comes last.
        words = _join(_validation_words(state.validation), f"step {state.validation_step}   ")
        rows.append(_labelled("validation", words))
    times = _times(state.metrics)
    if times:
        rows += [Text(), _last_step(state.metrics), _phase_bars(times, inner)]
    numbers = _numbers(state, inner)
    if numbers is not None:
        rows += [Text(), numbers]
    if state.events:
        rows += [
            Text(),
            *(Text(f"· {event}", style="dim", overflow="ellipsis", no_wrap=True) for event in state.events),
        ]
    return Panel(
        Group(*rows),
        title=Text(state.title, style="bold"),
        title_align="left",
        subtitle=Text(_clock_line(state, now), style="dim"),
        subtitle_align="right",
        border_style="bright_black",
        padding=(0, 1),
        width=min(width, 110),
    )


def plain_line(state: ConsoleState) -> str:
    """`step 12/100  reward 0.512  len 143  kl 0.0012  8.1 s  2310 tokens/s per device`"""
    metrics = state.metrics
    parts = [f"step {state.step}/{state.total_steps}"]
    if state.reward is not None:
        parts.append(f"reward {state.reward:.4g}")
    parts += [f"{label} {number(metrics[name])}" for name, label in _LINE.items() if name in metrics]
    if metrics.get("reward/failed"):
        parts.append(f"failed {metrics['reward/failed']:.0f}")
    if "timing_s/step" in metrics:
        parts.append(f"{metrics['timing_s/step']:.1f} s")
    if "perf/throughput" in metrics:
        parts.append(f"{metrics['perf/throughput']:,.0f} tokens/s per device")
    if state.validation_step == state.step:
        parts += [f"{name} {words}" for name, words in _validation_words(state.validation).items()]
    return "  ".join(parts)


def number(value: float) -> str:
    """Four digits that do not jump around."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if abs(value) < 0.001 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """`0:07`, `12:40`, `3:04:10`"""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _steps(state: ConsoleState, inner: int) -> RenderableType:
    counter = f"{state.step}/{state.total_steps}"
    return _row("step", counter, ProgressBar(max(state.total_steps, 1), state.step, complete_style="green"), inner)


def _phase(state: ConsoleState, now: float, inner: int) -> RenderableType:
    if state.phase_name is None:
        return Group(_labelled("phase", Text("-", style="dim")), Text())
    seconds = now - state.phase_start
    name = Text(state.phase_name.replace("_", " "), style="cyan")
    name.append(f"  {seconds:.1f} s", style="dim")
    usual = state.metrics.get(f"timing_s/{state.phase_name}", 0.0)
    if state.waits:
        return Group(_labelled("phase", name), _labelled("", Text(state.waits, style="yellow"), wraps=True))
    if usual <= 0:
        # The empty line is the place of the bar: nothing below moves when a phase has none.
        return Group(_labelled("phase", name), Text())
    # The time that the phase took in the last step is the best estimate of its end.
    name.append(f" of about {usual:.1f} s", style="dim")
    bar = ProgressBar(usual, min(seconds, usual), complete_style="cyan", finished_style="cyan")
    return Group(_labelled("phase", name), _row("", "", bar, inner))


def _reward(state: ConsoleState, inner: int) -> RenderableType:
    latest, best = number(state.rewards[-1]), f"  best {number(max(state.rewards))}"
    line = sparkline(list(state.rewards), inner - _LABEL - len(latest) - len(best) - 2)
    return _labelled("reward", Text.assemble((line, "green"), "  ", (latest, "bold"), (best, "dim")))


def _last_step(metrics: Mapping[str, float]) -> RenderableType:
    words = Text(f"{metrics['timing_s/step']:.2f} s" if "timing_s/step" in metrics else "")
    if "perf/throughput" in metrics:
        words.append(f"  {metrics['perf/throughput']:,.0f} tokens/s per device", style="dim")
    if "perf/mfu/actor" in metrics:
        words.append(f"  {metrics['perf/mfu/actor']:.0%} of the peak in updates", style="dim")
    return _labelled("last step", words)


def _phase_bars(times: Mapping[str, float], inner: int) -> RenderableType:
    total, longest = sum(times.values()), max(times.values())
    label = min(max(len(name) for name in times), 24)
    width = inner - label - 16
    table = Table.grid(padding=(0, 1))
    table.add_column(width=label, style="dim", no_wrap=True, overflow="ellipsis")
    table.add_column(width=width)
    table.add_column(justify="right", width=8)
    table.add_column(justify="right", width=5, style="dim")
    for name, seconds in sorted(times.items(), key=lambda item: -item[1]):
        blocks = round(seconds / longest * width)
        table.add_row(
            name.replace("_", " "), Text("━" * blocks, style="blue"), f"{seconds:.2f} s", f"{seconds / total:.0%}"
        )
    return table


def _numbers(state: ConsoleState, inner: int) -> RenderableType | None:
    shown = [(label, name) for name, label in _SHOWN.items() if name in state.metrics]
    if not shown:
        return None
    columns = 3 if inner >= 90 else 2 if inner >= 56 else 1
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(columns):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(width=2)
    for start in range(0, len(shown), columns):
        cells: list[RenderableType] = []
        for label, name in shown[start : start + columns]:
            cells += [label, number(state.metrics[name]), _trend(state, name)]
        table.add_row(*cells)
    return table


def _trend(state: ConsoleState, name: str) -> Text:
    if name not in state.previous or state.previous[name] == state.metrics[name]:
        return Text(" ")
    return Text("↑" if state.metrics[name] > state.previous[name] else "↓", style="dim")


def _times(metrics: Mapping[str, float]) -> dict[str, float]:
    prefix = "timing_s/"
    times = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    # `agent_loop/...` is a part of gen, by trajectory.
    return {name: value for name, value in times.items() if name not in _WHOLE and "/" not in name and value > 0}


def _validation_words(validation: Mapping[str, float]) -> dict[str, str]:
    """`openai/gsm8k acc mean@1`, one per data source (the first metric stands for it), and the responses' lengths."""
    chosen: dict[str, tuple[str, str]] = {}
    for name, value in sorted(validation.items(), key=lambda item: "/acc/" not in item[0]):
        if name in _VALIDATED:
            continue
        source, _, metric = name.removeprefix("val-core/").rpartition("/")
        source, _, kind = source.rpartition("/")
        chosen.setdefault(source, (f"{source} {kind} {metric}", f"{value:.3f}"))
    words = dict(chosen.values())
    for name, label in _VALIDATED.items():
        if name in validation:
            words[label] = f"{validation[name]:.0%}" if name.endswith("ratio") else number(validation[name])
    return words


def _clock_line(state: ConsoleState, now: float) -> str:
    left = state.seconds_left(now)
    return f"{duration(now - state.started)} elapsed" + (f" · {duration(left)} left" if left is not None else "")


def _join(values: Mapping[str, str], before: str = "") -> Text:
    text = Text(overflow="ellipsis", no_wrap=True)
    text.append(before, style="dim")
    for i, (name, words) in enumerate(values.items()):
        text.append(("   " if i else "") + name + " ", style="dim")
        text.append(words, style="bold magenta")
    return text


def _labelled(label: str, content: RenderableType, *, wraps: bool = False) -> RenderableType:
    table = Table.grid(padding=0, expand=True)
    table.add_column(width=_LABEL, style="dim")
    table.add_column(ratio=1, no_wrap=not wraps, overflow="ellipsis")  # a long line is cut, and not the label
    table.add_row(label, content)
    return table


def _row(label: str, value: str, bar: ProgressBar, inner: int) -> RenderableType:
    counter = len(value) + 2 if value else 0
    table = Table.grid(padding=0)
    table.add_column(width=_LABEL, style="dim")
    if value:
        table.add_column(width=counter)
    table.add_column(width=inner - _LABEL - counter)
    table.add_row(label, *([value] if value else []), bar)
    return table
