"""One HTML file about a run, complete in itself: curves, time, warnings, responses, settings. All text is escaped.

Curves are drawn with matplotlib: one SVG of each, and one PNG of all beside the file.
"""

from __future__ import annotations

import datetime
import io
from html import escape
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dovetail.dashboard.charts import ASYNC, OVERVIEW, VALIDATION_TRUNCATED, Chart, headlines, names_of, points
from dovetail.dashboard.config_view import config_rows
from dovetail.dashboard.responses import Wish
from dovetail.dashboard.run_files import DashboardError, MetricsTable
from dovetail.dashboard.runs import Run, Runs
from dovetail.dashboard.step_times import phase_words, recent_shares, what_it_waits_for
from dovetail.observability.run_folder import write_text

COLOURS = ("#0d9488", "#e07b00", "#6366f1", "#d6336c", "#2f9e44")
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#b6bec8",
    "axes.grid": True,
    "grid.color": "#e6e9ee",
    "svg.fonttype": "none",
    "svg.hashsalt": "dovetail",
}
_MOST = 400
_LENGTHS = {"val-aux/response_length/mean": "mean length", VALIDATION_TRUNCATED: "share truncated"}


def recorded_charts(table: MetricsTable) -> list[tuple[Chart, list[str]]]:
    """The charts this run has numbers for."""
    charts = [(chart, names_of(chart, table.names)) for chart in (*OVERVIEW, *ASYNC)]
    return [(chart, names) for chart, names in charts if any(len(table.finite(name)[1]) for name in names)]


def write_png(table: MetricsTable, title: str, file: Path) -> None:
    """All recorded charts in one picture."""
    charts = recorded_charts(table)
    columns = min(3, max(1, len(charts)))
    rows = max(1, -(-len(charts) // columns))
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2 * columns, 2.7 * rows + 0.5), dpi=110, layout="constrained")
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        for index, (chart, names) in enumerate(charts):
            axes = figure.add_subplot(rows, columns, index + 1)
            axes.set_title(chart.title, loc="left", fontsize=10, fontweight="bold")
            _draw(axes, table, names, share=chart.share)
        if not charts:
            figure.text(0.5, 0.4, "no step is recorded yet", ha="center", color="#5f6b7a")
        figure.savefig(file, format="png")


def svg(table: MetricsTable, names: list[str], *, share: bool = False) -> str:
    """One chart as an `<svg>` element."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6, 2.4), layout="constrained")
        _draw(figure.add_subplot(), table, names, share=share)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw(axes: Axes, table: MetricsTable, names: list[str], *, share: bool) -> None:
    """`share`: the axis begins at 0, as on the page, so that 97 % does not look like nothing."""
    for name, colour in zip(names, COLOURS * len(names), strict=False):
        smoothing = 0.9 if len(table) > 100 else 0.0
        line = points(table, name, smoothing=smoothing, most=_MOST)
        if not line["x"]:
            continue
        marker = "o" if len(line["x"]) < 60 else None
        if smoothing and len(line["x"]) > 60:
            axes.plot(line["x"], line["y"], color=colour, linewidth=0.6, alpha=0.3)
            axes.plot(line["sx"], line["sy"], color=colour, linewidth=1.6, label=name)
        else:
            axes.plot(line["x"], line["y"], color=colour, linewidth=1.5, marker=marker, markersize=3, label=name)
    axes.set_xlabel("step", fontsize=8, color="#5f6b7a")
    axes.tick_params(labelsize=8, colors="#5f6b7a", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    if share:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if len(names) > 1:
        axes.legend(fontsize=7, frameon=False)


_SAMPLES = 4


def write_report(folder: Path, out: Path) -> tuple[Path, Path]:
    """Write `out` (HTML) and the picture of the curves beside it; returns both."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise DashboardError(f"{out} must end in .html; the picture gets the same name with .png.")
    runs = Runs([folder]).find()
    if len(runs) != 1:
        names = ", ".join(run.name for run in runs)
        raise DashboardError(f"{folder} holds {len(runs)} runs ({names}); a report is about one: give its folder.")
    run = runs[0]
    run.refresh()
    if not len(run.metrics):
        problem = f"{folder} has no finished step yet; there is nothing to report. {run.failed()}"
        raise DashboardError(problem.rstrip())
    picture = out.with_suffix(".png")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_png(run.metrics, run.name, picture)
    write_text(out, _page(run))
    return out, picture


def _page(run: Run) -> str:
    sections = (_head(run), _warnings(run), _curves(run), _time(run), _validation(run), _answers(run), _config(run))
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(run.name)} · dovetail report</title><style>{_CSS}</style></head>
<body>{"".join(sections)}<footer>Written by <code>dovetail report</code> on {today}.</footer></body></html>
"""


def _head(run: Run) -> str:
    status, config = run.status(), run.settings()
    model = str(config.get("actor_rollout_ref.model.path", "")).rstrip("/").split("/")[-1]
    facts = [
        f"{status['state']}, step {status['step']}" + (f" of {status['total_steps']}" if status["total_steps"] else ""),
        model,
        *_method(config),
    ]
    cards = "".join(
        f"<div class=card><small>{escape(one['title'])}</small><b>{one['last']:.4g}</b>"
        f"<small>{one['first']:.4g} at step {one['first_step']}</small></div>"
        for one in headlines(run.metrics)
    )
    line = " · ".join(escape(fact) for fact in facts if fact)
    return f"<h1>{escape(run.name)}</h1><p class=soft>{line}</p><div class=cards>{cards}</div>"


def _method(config: dict[str, Any]) -> tuple[str, ...]:
    """What the run did: the algorithm and the engine of RL, the name of another method."""
    method = str(config.get("trainer.method", ""))
    if method in ("sft", "dpo", "reward"):
        return (method,)
    first = method if method == "distill" else str(config.get("algorithm.adv_estimator", ""))
    return first, str(config.get("actor_rollout_ref.rollout.name", ""))


def _warnings(run: Run) -> str:
    warnings = run.health()
    if not warnings:
        return "<p class=ok>All checks pass.</p>"
    rows = "".join(
        f"<li class={escape(warning['severity'])}><b>{escape(warning['title'])}.</b> {escape(warning['evidence'])} "
        f"<i>Try:</i> {escape(warning['what_to_try'])}</li>"
        for warning in warnings
    )
    return f"<h2>Warnings</h2><ul class=warnings>{rows}</ul>"


def _curves(run: Run) -> str:
    charts = "".join(
        f"<figure><figcaption>{escape(chart.title)}</figcaption>{svg(run.metrics, names, share=chart.share)}</figure>"
        for chart, names in recorded_charts(run.metrics)
    )
    return f"<h2>Curves</h2><div class=grid>{charts}</div>"


def _time(run: Run) -> str:
    shares, seconds = recent_shares(run.metrics)
    words = phase_words(run.timelines)
    waits = what_it_waits_for(run.metrics, run.timelines)
    rows = "".join(
        f"<tr><td>{escape(words.get(key, key))}</td><td class=bar><i style='width:{share:.1%}'></i></td>"
        f"<td>{share:.1%}</td><td>{share * seconds:.3g} s</td></tr>"
        for key, share in sorted(shares.items(), key=lambda pair: -pair[1])
        if share >= 0.0005
    )
    return f"<h2>Time</h2><p>{escape(waits['sentence'])}</p><table>{rows}</table>"


def _validation(run: Run) -> str:
    core = [name for name in run.metrics.names if name.startswith("val-core/")]
    names = [name for name in core if "@" in name.rpartition("/")[2]][:6]  # not verl's `best@4/mean` beside `best@4`
    if not names:
        return ""
    labels = {name: name.removeprefix("val-core/") for name in names}
    labels |= {name: words for name, words in _LENGTHS.items() if name in run.metrics.names}
    steps = sorted({int(step) for name in names for step in run.metrics.finite(name)[0]})
    shown = steps if len(steps) <= 12 else [steps[index * (len(steps) - 1) // 11] for index in range(12)]
    table = {name: dict(zip(*(part.tolist() for part in run.metrics.finite(name)), strict=True)) for name in labels}
    head = "".join(f"<th>{escape(words)}</th>" for words in labels.values())
    rows = "".join(
        f"<tr><td>{step}</td>" + "".join(f"<td>{_number(table[name].get(step))}</td>" for name in labels) + "</tr>"
        for step in shown
    )
    return f"<h2>Validation</h2><table><tr><th>step</th>{head}</tr>{rows}</table>"


def _answers(run: Run) -> str:
    """The same validation prompts at the first and the last validation, or else groups of the last training step."""
    answers = run.responses("validation")
    steps = answers.steps()
    if len(steps) >= 2:
        parts = []
        for group in answers.page(steps[-1], Wish(), first=0, count=_SAMPLES)["groups"]:
            try:
                before = answers.group_of_prompt(steps[0], group["key"])
            except DashboardError:
                continue
            sides = (f"step {steps[0]}", before["answers"][:1]), (f"step {steps[-1]}", group["answers"][:1])
            parts.append(_sample(group, sides))
        return "<h2>Responses to held-out prompts</h2>" + "".join(parts)
    answers = run.responses("rollouts")
    steps = answers.steps()
    if not steps:
        return ""
    groups = answers.page(steps[-1], Wish(), first=0, count=_SAMPLES)["groups"]
    parts = [_sample(group, ((f"step {steps[-1]}", group["answers"][:4]),)) for group in groups]
    return "<h2>Responses of the last step</h2>" + "".join(parts)


def _sample(group: dict[str, Any], sides: tuple[tuple[str, list[dict[str, Any]]], ...]) -> str:
    columns = ""
    for title, shown in sides:
        texts = "".join(
            f"<div class='answer {'no' if one['wrong'] else 'yes'}'><small>reward {_number(one['score'])}, "
            f"{one['length']} tokens{', truncated' if one['truncated'] else ''}</small>"
            f"<pre>{escape(one['response'][:4000]) or '(empty)'}</pre></div>"
            for one in shown
        )
        columns += f"<div><h3>{escape(title)}</h3>{texts}</div>"
    truth = f"<p class=soft>expected: {escape(str(group['ground_truth']))}</p>" if group["ground_truth"] else ""
    prompt = escape(group["prompt"][-2000:])
    return f"<section><pre class=prompt>{prompt}</pre>{truth}<div class=sides>{columns}</div></section>"


def _config(run: Run) -> str:
    rows = [row for row in config_rows(run.settings()) if not row["is_default"]]
    if not rows:
        return ""
    lines = "".join(
        f"<tr><td><code>{escape(row['key'])}</code></td><td><code>{escape(str(row['value']))}</code></td>"
        f"<td class=soft><code>{escape(str(row['default']))}</code></td></tr>"
        for row in rows
    )
    head = "<tr><th>key</th><th>value</th><th>default</th></tr>"
    return f"<h2>Settings that differ from the defaults</h2><table>{head}{lines}</table>"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


_CSS = """
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:#17202a;max-width:1180px;
margin:28px auto;padding:0 18px}
h1{margin:0;font-size:26px}h2{margin:30px 0 8px;font-size:18px}h3{margin:0 0 4px;font-size:13px;color:#5f6b7a}
.soft,small,footer{color:#5f6b7a}.cards{display:flex;flex-wrap:wrap;gap:10px;margin-top:10px}
.card{border:1px solid #dfe3e8;border-radius:10px;padding:8px 14px;display:flex;flex-direction:column}
.card b{font-size:22px}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr));gap:12px}
figure{margin:0;border:1px solid #dfe3e8;border-radius:10px;padding:8px}figcaption{font-weight:600;font-size:14px}
svg{width:100%;height:auto}
table{border-collapse:collapse;font-size:14px;max-width:100%;display:block;overflow-x:auto}
td,th{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid #e9ecef;vertical-align:top}
code{overflow-wrap:anywhere}
.bar{width:260px}.bar i{display:block;height:12px;margin-top:5px;background:#0d9488;border-radius:3px}
.warnings li{margin:6px 0;padding:6px 12px;background:#fdf0cf;border-radius:8px;list-style:none}.warnings{padding:0}
.warnings .bad{background:#fde2e1}.ok{background:#d3f4e4;padding:6px 12px;border-radius:8px;display:inline-block}
section{border:1px solid #dfe3e8;border-radius:10px;padding:10px 14px;margin:10px 0}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0}
.prompt{font-size:13px;color:#5f6b7a;max-height:9em;overflow:auto}
.sides{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(300px,100%),1fr));gap:12px}
.answer{border-left:3px solid #12b886;padding:2px 10px;margin-bottom:6px}.answer.no{border-color:#e8590c}
footer{margin-top:34px}
"""
