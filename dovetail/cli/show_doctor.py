"""Draw what `dovetail doctor` finds: tables and bars in a terminal, the same as plain text elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.status import Status as Status_
from rich.table import Table
from rich.text import Text

from dovetail.agents.template_audit import MEANING, TemplateAudit
from dovetail.config.fsdp import full_dtype
from dovetail.config.installed import Part, Status
from dovetail.config.root import DovetailConfig
from dovetail.doctor.agreement import Examination, LogProbDiffs, Stage
from dovetail.doctor.cluster import PathResult

WIDTH = 100
_MARKS: dict[Status, tuple[str, str]] = {"ok": ("✓", "green"), "missing": ("-", "dim"), "unsupported": ("!", "yellow")}
_VERDICTS = {"ok": "green", "not here": "dim", "refused": "yellow"}
_PATH_WIDTHS = (26, 8, 5)
_VERSIONS_A_LINE = 4
_BAR = "█"
_BAR_WIDTH = 30
_NUMBER = {"justify": "right", "style": "dim", "no_wrap": True}


class DoctorView:
    """Everything the command shows, in the order it is found."""

    def __init__(self, *, record: bool = False) -> None:
        probe = Console()
        width = min(WIDTH, probe.width) if probe.is_terminal else WIDTH
        self._console = Console(highlight=False, width=width, record=record)
        self._stage = ""
        self._examined = False

    def machine(self, rows: Sequence[tuple[str, str]], core: Sequence[Part]) -> None:
        grid = _grid()
        for name, words in rows:
            grid.add_row(Text(name, style="dim"), words)
        for first in range(0, len(core), _VERSIONS_A_LINE):
            grid.add_row(Text("" if first else "versions", style="dim"), _versions(core[first:][:_VERSIONS_A_LINE]))
        self._section("This machine", grid)

    def parts(self, parts: Sequence[Part]) -> None:
        purpose = {"style": "dim", "overflow": "fold", "max_width": 38}
        table = _table({"width": 1}, {"no_wrap": True}, purpose, {"overflow": "fold"})
        kind = ""
        for part in parts:
            if part.kind != kind and kind:
                table.add_row()
            kind = part.kind
            sign, colour = ("✗", "bold red") if part.failed else _MARKS[part.status]
            name = Text(part.name, style="bold" if part.needed else "")
            table.add_row(Text(sign, style=colour), name, part.purpose, _state(part))
        legend = Text("bold: this run uses it", style="dim")
        self._section("Engines, backends, extras", Group(table, legend))

    def note(self, words: str) -> None:
        self._console.print(Padding(Text(words, style="dim"), (0, 0, 1, 2)))

    def problems(self, title: str, lines: Sequence[str]) -> None:
        grid = _grid()
        for line in lines:
            grid.add_row(Text("✗", style="bold red"), Text(line))
        self._section(title, grid, colour="red")

    @contextmanager
    def working(self) -> Iterator[Callable[[str], None]]:
        """A line that says what is being done; gone when it is over."""
        with self._console.status("", spinner="dots") as status:

            def on_stage(name: str) -> None:
                self._stage = name
                status.update(f"{name} ...")

            yield on_stage

    def failure(self, error: BaseException) -> None:
        lines = str(error).strip().splitlines() or [""]
        text = Text(f"{type(error).__name__}: ", style="bold red").append("\n".join(lines[:30]), style="")
        self._section(f"Failed at: {self._stage}", text, colour="red")

    def examination(self, config: DovetailConfig, result: Examination) -> None:
        policy = config.actor_rollout_ref
        self._examined = True
        processes = config.trainer.world_size
        # A sharding over one process is none; see dovetail.workers.build.
        backend = "one-process" if processes == 1 and policy.actor.strategy != "megatron" else policy.actor.strategy
        facts = Text(
            f"{Path(policy.model.path).name}: {policy.rollout.name} engine in {full_dtype(policy.rollout.dtype)}, "
            f"{backend} trainer in {full_dtype(policy.actor.fsdp_config.mixed_precision.param_dtype)}, "
            f"{processes} process{'es' * (processes != 1)}",
            style="dim",
        )
        self._section("Do engine and trainer agree?", Group(facts, Text(), _stages(result.stages)))
        self._section(
            "Where log-probs of sampled tokens differ", Group(_histogram(result.sampled), Text(), _worst(result))
        )
        for report in (result.before, result.after):
            if not report.passed:
                self.problems("Greedy answers", [report.explain(policy.rollout.name)])
        if not result.sampled.tells:
            moved = f"the training step moved log-probs by {result.sampled.moved:.2g} only"
            self.problems("The step is too small", [f"{moved}: an engine that missed it could not be told apart."])

    @contextmanager
    def paths(self) -> Iterator[PathRows]:
        """One row a path, shown as soon as it is over."""
        self._console.print(Text("Every path, on these devices", style="bold"))
        with self._console.status("", spinner="dots") as status:
            yield PathRows(self._console, status)
        self._console.print()

    def verdict(self, healthy: bool, svg: Path | None) -> int:
        """The last word, and the picture; returns the exit code."""
        proof = ", and engine and trainer agree" if self._examined else ""
        words = f"healthy: what this run needs is here{proof}" if healthy else "not healthy: see above"
        self._end(words, "green" if healthy else "red", svg)
        return 0 if healthy else 1

    def audit(self, model: str, audit: TemplateAudit, svg: Path | None, *, notice: str = "") -> int:
        """What a chat template does with conversations, and what that means for training."""
        properties = Table.grid(padding=(0, 2))
        for name, meaning in MEANING.items():
            broken = audit.failures(name)
            properties.add_row(_mark(not broken), name.replace("_", " "), Text(meaning, style="dim"))
        self._section(f"The chat template of {model}", properties)
        cases = _grid()
        for case in audit.cases:
            cases.add_row(_mark(case.rewrite is None), Text(case.name))
            if case.rewrite is not None:
                cases.add_row(
                    "", Text(f"{case.rewrite.property.replace('_', ' ')}: {case.rewrite.example}", style="dim")
                )
        self._section("Kinds of conversations", cases)
        facts = [f"an answer ends with {' or '.join(audit.stop_tokens) or 'no special token'}"]
        facts += [notice] if notice else []
        if not audit.shows_tools:
            facts.append("the template does not show tools to the model: describe them in the system prompt")
        if not audit.writes_calls:
            facts.append("the template does not write calls: those of earlier turns are written in hermes' format")
        self.note("\n".join(facts))
        if audit.append_only:
            words, colour = "append-only: each trajectory is one row, and every token is as it was sampled", "green"
        else:
            words = (
                "not append-only: where history is rewritten a trajectory goes on in a new row, which costs the prefix "
                "again; each sampled token is still trained once. What is refused ends the trajectory with an error."
            )
            colour = "yellow"
        self._end(words, colour, svg)
        return 0 if audit.append_only else 1

    def _end(self, words: str, colour: str, svg: Path | None) -> None:
        self._console.print(Panel(Text(words, style=f"bold {colour}"), border_style=colour, box=box.ROUNDED))
        if svg is None:
            return
        svg.parent.mkdir(parents=True, exist_ok=True)
        # Rich's own format fetches a font from the internet; any monospace font of the reader's machine will do.
        offline = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
        self._console.save_svg(str(svg), title="dovetail doctor", code_format=offline)

    def _section(self, title: str, body: RenderableType, colour: str = "") -> None:
        self._console.print(Text(title, style=f"bold {colour}".strip()))
        self._console.print(Padding(body, (0, 0, 1, 2)))


class PathRows:
    """The rows of a table that grows: path, verdict, seconds, what was seen."""

    def __init__(self, console: Console, status: Status_) -> None:
        self._console, self._status = console, status

    def begin(self, name: str) -> None:
        self._status.update(f"{name} ...")

    def finish(self, result: PathResult) -> None:
        row = Table.grid(padding=(0, 2, 0, 0))
        for width in _PATH_WIDTHS:
            row.add_column(width=width, no_wrap=True)
        row.add_column(overflow="fold")
        style = _VERDICTS.get(result.verdict, "bold red")
        took = Text(f"{result.seconds:.0f} s", style="dim", justify="right")
        row.add_row(result.name, Text(result.verdict, style=style), took, Text(result.seen))
        self._console.print(Padding(row, (0, 0, 0, 2)))


def _mark(held: bool) -> Text:
    return Text("✓", style="green") if held else Text("✗", style="bold red")


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _table(*columns: dict[str, Any]) -> Table:
    """Without lines and headings; the arguments of `add_column` for each column."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for column in columns:
        table.add_column(**column)
    return table


def _versions(parts: Sequence[Part]) -> Text:
    line = Text()
    for part in parts:
        version = part.version.removeprefix(part.name).strip() or "missing"
        line.append(f"{part.name} ", style="dim").append(f"{version}   ", style="red" if part.failed else "")
    return line


def _state(part: Part) -> Text:
    if part.status == "ok":
        return Text(part.version)
    if part.status == "missing":
        return Text(part.fix, style="red" if part.failed else "dim")
    return Text(f"{part.version}: {part.fix}", style="red" if part.failed else "yellow")


def _stages(stages: Sequence[Stage]) -> Table:
    table = _table({"width": 1}, {"no_wrap": True}, _NUMBER, {"overflow": "fold"})
    for stage in stages:
        outcome = Text(stage.outcome, style="" if stage.passed else "red")
        table.add_row(_mark(stage.passed), stage.name, f"{stage.seconds:.1f} s", outcome)
    return table


def _histogram(sampled: LogProbDiffs) -> Group:
    """Tokens by the power of ten of their difference, with the pass mark among them."""
    table = _table(_NUMBER, {"no_wrap": True}, _NUMBER)
    decades = sampled.decades()
    most = max(1, *(count for _, count in decades))
    for power, count in decades:
        good = power is None or 10**power < sampled.mark.mean
        bar = _BAR * max(1 if count else 0, round(_BAR_WIDTH * count / most))
        name = "equal" if power is None else f"from 1e{power}"
        table.add_row(
            name, Text(bar, style="green" if good else "yellow"), f"{count} token{'s' * (count != 1)}" if count else ""
        )
    summary = Text()
    summary.append(f"mean {sampled.mean:.2g}", style="bold green" if sampled.mean <= sampled.mark.mean else "bold red")
    summary.append(f" (pass mark {sampled.mark.mean:g})", style="dim")
    summary.append("   ")
    within = sampled.largest <= sampled.mark.largest
    summary.append(f"largest {sampled.largest:.2g}", style="bold green" if within else "bold red")
    summary.append(f" (pass mark {sampled.mark.largest:g})", style="dim")
    missed = Text(f"an engine that missed the training step would be off by {sampled.moved:.2g}", style="dim")
    return Group(table, Text(), summary, missed)


def _worst(result: Examination) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim", padding=(0, 1))
    table.add_column("largest differences")
    for name in ("prompt", "position", "token", "engine", "trainer", "difference"):
        table.add_column(name, justify="right")
    for text, token in result.worst:
        numbers = (token.prompt, token.position, token.token_id)
        table.add_row(
            Text(repr(text)), *map(str, numbers), f"{token.engine:.6f}", f"{token.trainer:.6f}", f"{token.diff:.1e}"
        )
    return table
