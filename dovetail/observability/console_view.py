"""Draws a `ConsoleState`: as a rich picture, or as one line. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dovetail.observability.console_state import ConsoleState
from dovetail.observability.sparkline import sparkline

# Metric -> what a reader calls it. Shown when present, in this order.
_SHOWN = {
    "response_length/mean": "response length",
    "actor/pg_loss": "policy loss",
    "actor/entropy": "entropy",
    "actor/ppo_kl": "ppo kl",
    "actor/kl_loss": "kl loss",
    "actor/pg_clipfrac": "clip fraction",
    "actor/grad_norm": "grad norm",
    "actor/lr": "learning rate",
    "critic/vf_loss": "value loss",
    "rollout_corr/kl": "engine mismatch (kl)",
    "reward/failed": "failed rewards",
}
_LINE = {"response_length/mean": "len", "actor/entropy": "entropy", "actor/ppo_kl": "kl", "actor/grad_norm": "grad"}
# Phases that contain others: their bar would hide the rest.
_WHOLE = ("step",)
_LABEL = 12


def draw(state: ConsoleState, now: float, width: int) -> RenderableType:
    """The picture at this moment, for a terminal of `width` columns."""
    inner = max(40, min(width, 110) - 4)
    rows: list[RenderableType] = [_steps(state, inner), _phase(state, now, inner)]
    if state.rewards:
        rows.append(_reward(state, inner))
    if state.validation:
        words = _join(_validation_names(state.validation))
        words.append(f"   step {state.validation_step}", style="dim")
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
        parts += [f"{name} {value:.3f}" for name, value in _validation_names(state.validation).items()]
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
    return {name: value for name, value in times.items() if name not in _WHOLE and value > 0}


def _validation_names(validation: Mapping[str, float]) -> dict[str, float]:
    """`openai/gsm8k acc mean@1`, one per data source: the first metric stands for it."""
    chosen: dict[str, tuple[str, float]] = {}
    for name, value in sorted(validation.items(), key=lambda item: "/acc/" not in item[0]):
        source, _, metric = name.removeprefix("val-core/").rpartition("/")
        source, _, kind = source.rpartition("/")
        chosen.setdefault(source, (f"{source} {kind} {metric}", value))
    return dict(chosen.values())


def _clock_line(state: ConsoleState, now: float) -> str:
    left = state.seconds_left(now)
    return f"{duration(now - state.started)} elapsed" + (f" · {duration(left)} left" if left is not None else "")


def _join(values: Mapping[str, float]) -> Text:
    text = Text(overflow="ellipsis", no_wrap=True)
    for i, (name, value) in enumerate(values.items()):
        text.append(("   " if i else "") + name + " ", style="dim")
        text.append(f"{value:.3f}", style="bold magenta")
    return text


def _labelled(label: str, content: RenderableType) -> RenderableType:
    table = Table.grid(padding=0)
    table.add_column(width=_LABEL, style="dim")
    table.add_column(no_wrap=True, overflow="ellipsis")
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
