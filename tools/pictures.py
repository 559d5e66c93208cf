"""The pictures of a run in the docs, from the files of a run: its curve, and the live view as it was at one step.

    python tools/pictures.py runs/demo docs/assets [--step 14]

The dashboard's, by Chromium: an agent's run, one with the numbers of single tokens, an asynchronous one.

    PYTHONPATH=. python tools/pictures.py --dashboard runs/agent runs/tokens runs/async docs/assets
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path

from dovetail.dashboard.report import COLOURS, STYLE
from dovetail.observability.console_view import ConsoleState, draw
from dovetail.observability.run_folder import NOW, RunFolder

WIDTH = 100
# Which of the runs, what is shown of it, width and height.
VIEWS = {
    "overview": (0, "view=overview", 1280, 860),
    "rollouts": (0, "view=rollouts&step=2", 1280, 860),
    "compare": (0, "view=rollouts&kind=validation", 1280, 860),
    "time": (0, "view=time", 1280, 860),
    "tokens": (1, "view=rollouts&colour=token_entropies", 1280, 860),
    "async": (2, "view=async", 1024, 800),
}


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


def dashboard(runs: Sequence[Path], assets: Path) -> None:
    """A picture of each of `VIEWS`."""
    from playwright.sync_api import sync_playwright

    from tests.dashboard.browser import chromium, serve

    with sync_playwright() as playwright, serve(*runs) as server:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        for name, (number, place, width, height) in VIEWS.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(f"{server.address}/#run={runs[number].name}&{place}")
            page.wait_for_selector(".view[data-ready]")
            if name == "compare":
                page.get_by_text("other steps").first.click()
            page.wait_for_timeout(3000)  # charts are drawn by themselves
            page.screenshot(path=assets / f"dashboard-{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("assets", type=Path)
    parser.add_argument("--step", type=int, default=14, help="of the live view")
    parser.add_argument("--dashboard", action="store_true", help="pictures of the dashboard, of three runs")
    given = parser.parse_args()
    if given.dashboard:
        dashboard(given.runs, given.assets)
    else:
        curve(RunFolder(given.runs[0]), given.assets / "demo.png")
        live_view(RunFolder(given.runs[0]), given.assets / "console.svg", given.step)
