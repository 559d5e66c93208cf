"""The main curves as pictures: one PNG of all, one SVG of each. Draws with matplotlib; opens no window."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dovetail.dashboard.charts import OVERVIEW, Chart, names_of, points
from dovetail.dashboard.metrics_table import MetricsTable

_COLOURS = ("#0d9488", "#e07b00", "#6366f1", "#d6336c", "#2f9e44")
_STYLE = {
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


def recorded_charts(table: MetricsTable) -> list[tuple[Chart, list[str]]]:
    """The charts this run has numbers for."""
    charts = [(chart, names_of(chart, table.names)) for chart in OVERVIEW]
    return [(chart, names) for chart, names in charts if any(len(table.finite(name)[1]) for name in names)]


def write_png(table: MetricsTable, title: str, file: Path) -> None:
    """All recorded charts in one picture."""
    charts = recorded_charts(table)
    columns = min(3, max(1, len(charts)))
    rows = max(1, -(-len(charts) // columns))
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.2 * columns, 2.7 * rows + 0.5), dpi=110, layout="constrained")
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        for index, (chart, names) in enumerate(charts):
            axes = figure.add_subplot(rows, columns, index + 1)
            axes.set_title(chart.title, loc="left", fontsize=10, fontweight="bold")
            _draw(axes, table, names)
        if not charts:
            figure.text(0.5, 0.4, "no step is recorded yet", ha="center", color="#5f6b7a")
        figure.savefig(file, format="png")


def svg(table: MetricsTable, names: list[str]) -> str:
    """One chart as an `<svg>` element."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 2.4), layout="constrained")
        _draw(figure.add_subplot(), table, names)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw(axes: Axes, table: MetricsTable, names: list[str]) -> None:
    for name, colour in zip(names, _COLOURS * len(names), strict=False):
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
    if len(names) > 1:
        axes.legend(fontsize=7, frameon=False)
