"""The pictures of a run in the docs, from the files of a run: its curve, and the live view as it was at one step.

python tools/pictures.py runs/demo docs/assets [--step 14]
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

from dovetail.dashboard.report import COLOURS, STYLE
from dovetail.observability.console_view import ConsoleState, draw
from dovetail.observability.run_folder import NOW, RunFolder

WIDTH = 100


def curve(run: RunFolder, file: Path) -> None:
    """Training reward of each step, and accuracy where the run was validated."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = run.read_metrics()
    rewards = [(row["step"], row["critic/score/mean"]) for row in rows if "critic/score/mean" in row]
    accuracies = [(row["step"], value) for row in rows for name, value in row.items() if name.startswith("val-core/")]
    with rc_context({**STYLE, "font.size": 12}):
        figure = Figure(figsize=(10.8, 4.4), dpi=100, layout="constrained")
        axes = figure.subplots()
        axes.plot(*zip(*rewards, strict=True), "-o", color=COLOURS[0], label="training reward")
        axes.plot(
            *zip(*accuracies, strict=True), "o", color=COLOURS[1], markersize=10, label="held-out accuracy, greedy"
        )
        reward_of = dict(rewards)
        for step, value in accuracies:
            below = value <= reward_of.get(step, -1.0)
            axes.annotate(
                f"{value:.1%}", (step, value), (0, -24 if below else 10), textcoords="offset points", ha="center"
            )
        axes.set(xlabel="step", ylim=(0, 1.1))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="upper left", frameon=False)
        figure.savefig(file)


def live_view(run: RunFolder, file: Path, step: int) -> None:
    """What a terminal showed while the step after `step` began to generate."""
    from rich.console import Console

    now = 0.0
    rows = [row for row in run.read_metrics() if row["step"] <= step]
    total = json.loads((run.path / NOW).read_text()).get("total_steps") or step
    state = ConsoleState(run.path.name, total, clock=lambda: now)
    for row in rows:
        now += sum(row.get(f"timing_s/{part}", 0.0) for part in ("step", "testing", "save_checkpoint"))
        state.end_step(row["step"], row)
        if any(name.startswith("val-") for name in row):
            state.event("validation", row["step"], row)
    state.phase("gen")
    now += rows[-1]["timing_s/gen"] / 2
    console = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True)
    console.print(draw(state, now, WIDTH))
    console.save_svg(str(file), title="dovetail train")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("assets", type=Path)
    parser.add_argument("--step", type=int, default=14, help="of the live view")
    given = parser.parse_args()
    curve(RunFolder(given.run), given.assets / "demo.png")
    live_view(RunFolder(given.run), given.assets / "console.svg", given.step)
