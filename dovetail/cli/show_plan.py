"""Draw a plan on the console: tables in a terminal, the same tables as plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dovetail.config.errors import Problem
from dovetail.config.plan.batches import BatchPlan, PassBatches
from dovetail.config.plan.layout import RoleLayout
from dovetail.config.plan.memory import MemoryPlan, PhaseMemory, StageMemory
from dovetail.config.plan.plan import ModelSummary, Plan
from dovetail.config.units import GIB
from dovetail.trainer.async_plan import AsyncPlan

if TYPE_CHECKING:
    from dovetail.cli.check import Checked

# Tables are laid out for this width; a narrower terminal wraps them.
WIDTH = 100


def show(checked: Checked) -> None:
    """Print notices, what was chosen, the plan (when there is one), problems and the verdict."""
    console = Console(highlight=False)
    if console.is_terminal:
        _draw(console, checked)
        return
    # Rich fills every line up to the width; in a log or a file only the text should remain.
    console = Console(highlight=False, width=WIDTH, no_color=True)
    with console.capture() as captured:
        _draw(console, checked)
    sys.stdout.write(_without_padding(captured.get()))


def _draw(console: Console, checked: Checked) -> None:
    plan, schedule, findings = checked.plan, checked.schedule, checked.problems
    _bullets(console, "Notices", "cyan", [str(notice) for notice in checked.notices])
    _bullets(console, "Chosen", "cyan", [choice.message for choice in checked.choices])
    if plan is not None:
        if plan.model is not None:
            _heading(console, "Model")
            console.print(Padding(_model(plan.model), (0, 0, 1, 2)))
        _heading(console, "Placement")
        console.print(_placement(plan.layouts, console))
        _heading(console, "One training step")
        console.print(Padding(_step(plan.batches), (0, 0, 0, 2)))
        console.print(_passes(plan.batches.passes, console))
        if schedule is not None:
            _heading(console, "Generation ahead of training")
            console.print(Padding(_split(schedule), (0, 0, 0, 2)))
            console.print(_predictions(schedule, console))
        if plan.memory is not None:
            size = plan.memory.device_bytes / GIB
            _heading(console, f"Memory of the fullest {plan.memory.device} in each phase (GiB, of {size:.0f})")
            console.print(_memory(plan.memory, console))
            console.print(Padding(_memory_notes(plan.memory), (0, 0, 1, 2)))
            for role in dict.fromkeys(stage.role for stage in plan.memory.stages):
                _heading(console, f"Pipeline stages of the {role} during its update (GiB on each device)")
                console.print(_stages([stage for stage in plan.memory.stages if stage.role == role], console))
    _bullets(console, "Warnings", "yellow", [str(f) for f in findings if f.severity == "warning"])
    _bullets(console, "Errors", "red", [str(f) for f in findings if f.severity == "error"])
    if checked.looked_at:
        console.print(Padding(f"Checked: {checked.looked_at}", (0, 0, 1, 0)))
    console.print(_verdict(plan, findings))


def _split(schedule: AsyncPlan) -> Text:
    engines = f"{schedule.num_engines:,} engine{'s' * (schedule.num_engines > 1)}"
    if schedule.shares_devices:
        devices = f"{schedule.train_devices:,} devices train and generate in turns ({engines})"
    else:
        devices = f"{schedule.train_devices:,} devices train, {schedule.generation_devices:,} generate ({engines})"
    groups = "groups with a signal" if schedule.is_filtered else "groups"
    hint = "" if schedule.prediction else "\npredict step, idle shares and staleness: --like RUN, a synchronous run"
    return Text(
        f"{schedule.mode}: {devices}\nat most {schedule.groups_ahead:,} {groups} are in training, finished or running; "
        f"a step takes {schedule.groups_per_step:,}; staleness is at most {schedule.max_staleness}{hint}"
    )


def _predictions(schedule: AsyncPlan, console: Console) -> Padding:
    numbers = ("step (s)", "training (s)", "engines idle", "trainer idle", "staleness mean", "max")
    table = _table(console, ["predicted"], numbers)
    for name, each in (("taking turns", schedule.taking_turns), (schedule.mode, schedule.prediction)):
        if each is not None:
            times = (f"{each.step_s:.2f}", f"{each.train_s:.2f}")
            shares = (f"{each.engine_idle:.0%}", f"{each.trainer_idle:.0%}")
            table.add_row(name, *times, *shares, f"{each.staleness_mean:.2f}", str(each.staleness_max))
    return Padding(table if schedule.prediction else "", (0, 0, 0, 1))


def _without_padding(text: str) -> str:
    lines = [line.rstrip() for line in text.splitlines()]
    kept = [line for index, line in enumerate(lines) if line or (index and lines[index - 1])]
    return "\n".join(kept) + "\n"


def _heading(console: Console, title: str) -> None:
    console.print(Text(title, style="bold"))


def _bullets(console: Console, title: str, colour: str, lines: list[str]) -> None:
    if not lines:
        return
    console.print(Text(f"{title} ({len(lines)})", style=f"bold {colour}"))
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=3, justify="right")
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row(Text("-", style=colour), Text(line))
    console.print(grid)
    console.print()


def _table(console: Console, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """With columns of `words` on the left and of `numbers` on the right."""
    style = box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN
    table = Table(box=style, header_style="bold", pad_edge=not console.is_terminal, padding=(0, 1))
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _model(model: ModelSummary) -> Text:
    size = f"{_billions(model.parameters)} parameters"
    if model.active_parameters != model.parameters:
        size += f" ({_billions(model.active_parameters)} active per token)"
    context = f"{model.context_length:,} tokens" if model.context_length else "not stated"
    return Text(
        f"{model.path} ({model.model_type})\n{size}; {model.num_layers} layers, {model.num_heads} heads, "
        f"{model.num_kv_heads} KV heads\ncontext {context}, KV cache {model.kv_bytes_per_token / 1024:.1f} "
        "KiB per token"
    )


def _placement(layouts: Sequence[RoleLayout], console: Console) -> Padding:
    table = _table(console, ["role", "runs on", "pool"], ["devices"])
    table.add_column("layout", overflow="fold")
    for layout in layouts:
        backend = "one process" if layout.backend == "single" else layout.backend
        row = (layout.role.replace("_", " "), backend, layout.pool, f"{layout.world_size:,}", _sizes(layout))
        table.add_row(*row)
    return Padding(table, (0, 0, 0, 1))


def _sizes(layout: RoleLayout) -> str:
    sizes = [
        ("data", layout.data_parallel),
        ("tensor", layout.tensor_parallel),
        ("pipeline", layout.pipeline_parallel),
        ("context", layout.context_parallel),
        ("sequence", layout.sequence_parallel),
    ]
    text = " x ".join(f"{name} {size}" for name, size in sizes if size > 1 or name == "data")
    notes = []
    if layout.num_engines is not None:
        notes.append(f"{layout.num_engines:,} engine{'s' * (layout.num_engines != 1)}")
    if layout.backend in ("fsdp", "fsdp2"):
        copies = f", {layout.replicas} copies" if layout.replicas > 1 else ""
        notes.append(f"weights sharded over {layout.shard_size:,}{copies}")
    if layout.expert_parallel > 1:
        notes.append(f"experts over {layout.expert_parallel}")
    return "; ".join([text, *notes])


def _step(batches: BatchPlan) -> Text:
    if not batches.sequences_per_engine:
        pairs = " pairs" if batches.responses_per_prompt == 2 else ""
        return Text(
            f"{batches.prompts:,}{pairs or ' rows'}{f' = {batches.sequences:,} sequences' * bool(pairs)} "
            f"of at most {batches.max_sequence_length:,} tokens = {_short(batches.max_tokens)} tokens"
        )
    rounds = f"up to {batches.max_generation_rounds} rounds" if batches.max_generation_rounds else "as often as needed"
    generated = (
        f"{batches.generation_prompts:,} prompts generated at a time, {rounds}\n"
        if batches.generation_prompts != batches.prompts
        else ""
    )
    return Text(
        f"{batches.prompts:,} prompts x {batches.responses_per_prompt} responses = {batches.sequences:,} sequences "
        f"of at most {batches.max_sequence_length:,} tokens = {_short(batches.max_tokens)} tokens\n{generated}"
        f"{_number(batches.sequences_per_engine)} sequences per engine"
    )


def _passes(passes: Sequence[PassBatches], console: Console) -> Padding:
    cuts = ("sequences\nper rank", "mini-\nbatches", "sequences\nin each", "split by", "micro-batches\nin each")
    table = _table(console, ["pass"], [*cuts, "optimizer\nsteps"])
    for batch in passes:
        # At the longest lengths; shorter responses need fewer micro-batches.
        most = "<= " if batch.token_budget is not None else ""
        table.add_row(
            batch.name,
            _number(batch.sequences_per_rank),
            f"{batch.mini_batches:,}",
            _number(batch.sequences_per_mini_batch),
            _cut(batch),
            f"{most}{batch.micro_batches:,}",
            f"{batch.optimizer_steps:,}" if batch.trains else "-",
        )
    return Padding(table, (0, 0, 0, 1))


def _cut(batch: PassBatches) -> str:
    if batch.token_budget is not None:
        return f"{batch.token_budget:,} tokens"
    return f"{batch.micro_batch:,} sequences" if batch.micro_batch else "nothing"


def _memory(memory: MemoryPlan, console: Console) -> Padding:
    used = [name for name in memory.phases[0].items if any(phase.items[name] for phase in memory.phases)]
    table = _table(console, [""], [phase.name.replace(" ", "\n", 1) for phase in memory.phases])
    table.columns[0].no_wrap = True
    if any(phase.stage is not None for phase in memory.phases):
        table.add_row("pipeline stage", *("-" if phase.stage is None else str(phase.stage) for phase in memory.phases))
    for name in used:
        table.add_row(name, *(_item(phase, name) for phase in memory.phases), end_section=name == used[-1])
    table.add_row("total", *(_gib(phase.total) for phase in memory.phases), style="bold")
    table.add_row("", *(_fit(phase) for phase in memory.phases))
    return Padding(table, (0, 0, 0, 1))


def _stages(stages: Sequence[StageMemory], console: Console) -> Padding:
    names = ("stage", "layers", "ex-\nperts", "dense\n(B)", "routed\n(B)", "wei-\nghts", "grad-\nients", "opti-\nmizer")
    table = _table(console, [], [*names, "activ-\nations", "logits", "rest", "total"])
    # Stages in the middle are alike; one row stands for all that are.
    alike = [list(group) for _, group in groupby(stages, key=_stage_cells)]
    for group in alike:
        layers = _ranges([layer for stage in group for layer in stage.layers])
        numbers = _ranges([stage.stage for stage in group])
        table.add_row(numbers, layers, *_stage_cells(group[0]))
    return Padding(table, (0, 0, 1, 1))


def _stage_cells(stage: StageMemory) -> tuple[str, ...]:
    shown = ("weights", "gradients", "optimizer", "activations", "logits")
    rest = sum(size for name, size in stage.items.items() if name not in shown)
    return (
        str(stage.experts_per_device) if stage.expert_layers else "-",
        f"{stage.dense_parameters / 1e9:.2f}",
        f"{stage.expert_parameters / 1e9:.2f}" if stage.expert_layers else "-",
        *(_gib(stage.items[name]) for name in shown),
        _gib(rest),
        _gib(stage.total),
    )


def _ranges(layers: Sequence[int]) -> str:
    """`0-3, 8-11`: a stage of an interleaved schedule holds several runs."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "-"


def _item(phase: PhaseMemory, name: str) -> Text:
    # In a phase that does not fit, the largest item is the one to look at.
    return Text(_gib(phase.items[name]), style="red" if not phase.fits and name == phase.largest else "")


def _memory_notes(memory: MemoryPlan) -> Text:
    lines = []
    if memory.cached_tokens:
        sequences = _number(round(memory.full_sequences, 1 if memory.full_sequences < 10 else 0))
        lines.append(
            f"KV cache: {memory.cached_tokens:,} tokens per engine replica, "
            f"{sequences} sequences of full length at a time"
        )
    if memory.host_bytes_per_node:
        lines.append(f"Host memory for what is offloaded: {memory.host_bytes_per_node / GIB:.0f} GiB per node")
    text = Text("\n".join(lines))
    for line in memory.advice:
        text.append(f"{chr(10) * bool(text)}{line[0].upper()}{line[1:]}", style="yellow")
    return text


def _fit(phase: PhaseMemory) -> Text:
    return Text("fits", style="green") if phase.fits else Text("too big", style="bold red")


def _verdict(plan: Plan | None, findings: Sequence[Problem]) -> Text:
    errors = sum(finding.severity == "error" for finding in findings)
    if errors:
        return Text(f"invalid: {errors} error{'s' * (errors != 1)}", style="bold red")
    if plan is None or plan.memory is None:
        return Text("valid (memory not planned: the model's config.json is not here)", style="bold green")
    if not plan.memory.fits:
        return Text(f"valid, but it {plan.memory.verdict}", style="bold yellow")
    return Text(f"valid; it {plan.memory.verdict}", style="bold green")


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _short(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _gib(value: float) -> str:
    return f"{value / GIB:.1f}" if value else "-"
