"""Where the time and the memory of a run go: phases of each step, calls of each worker, the plan and what was used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.config.units import GIB
from dovetail.dashboard.async_view import WAIT_WORDS, busy_shares, idle_shares, is_asynchronous, waits
from dovetail.dashboard.charts import binned_means, rounded
from dovetail.dashboard.run_files import GrowingFile, MetricsTable, parse_object, read_at

PREFIX = "timing_s/"
PHASE_WORDS = {
    "gen": "generation",
    "old_log_prob": "old log-probs",
    "ref": "reference log-probs",
    "values": "values",
    "reward": "waiting for rewards",
    "adv": "advantages",
    "update_critic": "critic update",
    "update_actor": "actor update",
    "testing": "validation",
    "save_checkpoint": "checkpoint",
    "weight_sync": "weights to engines",
    "generate_groups": "generation",
    "commit_weights": "new weights",
    "other": "between phases",
    "step": "between phases",
}
_ADVICE = {
    "gen": "Shorter responses (data.max_response_length), another engine (actor_rollout_ref.rollout.name) or more of "
    "the device for its cache (actor_rollout_ref.rollout.gpu_memory_utilization) make it faster.",
    "update_actor": "Larger micro-batches (actor_rollout_ref.actor.ppo_max_token_len_per_gpu with use_dynamic_bsz) or "
    "no gradient checkpointing make it faster, as far as memory allows.",
    "update_critic": "Larger micro-batches (critic.ppo_max_token_len_per_gpu with use_dynamic_bsz) make it faster.",
    "old_log_prob": "A batch that is one optimizer step (ppo_mini_batch_size = train_batch_size, ppo_epochs = 1) needs "
    "no such pass.",
    "ref": "A larger actor_rollout_ref.ref.log_prob_max_token_len_per_gpu makes it faster.",
    "reward": "The reward function is slower than everything it runs beside: more scoring processes, or a cheaper "
    "check, help.",
    "testing": "Validate less often (trainer.test_freq) or on fewer prompts.",
    "save_checkpoint": "Save less often (trainer.save_freq).",
}
_ENGINES_ADVICE = (
    "The engines are slower than the trainer: more devices for them (actor_rollout_ref.rollout.n_gpus_per_node), "
    "shorter responses, or a larger async_training.max_staleness, where they wait for the trainer at other times."
)
_TURNS_ADVICE = (
    "Trainer and engines take turns: with async_training.mode=one_step_off both work at the same time. More devices "
    "for the engines (actor_rollout_ref.rollout.n_gpus_per_node) and shorter responses make generation faster."
)
_RECENT = 20
_BESIDE = ("testing", "save_checkpoint")  # not in `timing_s/step`


def phase_words(timelines: Timelines) -> dict[str, str]:
    """What phases are called. With engines on devices of their own the driver generates nothing: it waits."""
    return PHASE_WORDS | ({"gen": "waiting for groups"} if timelines.has_engines else {})


def phases(table: MetricsTable, most: int, words: Mapping[str, str] = PHASE_WORDS) -> dict[str, Any]:
    """Seconds of every phase per step, for stacked bars. Long runs are averaged over neighbouring steps."""
    # `timing_s/agent_loop/...` are seconds of trajectories, inside the generation.
    known = [name for name in table.names if name.startswith(PREFIX) and "/" not in name[len(PREFIX) :]]
    names = [name for name in known if name != f"{PREFIX}step"]
    step_seconds = table.column(f"{PREFIX}step")
    kept = np.isfinite(step_seconds)
    if not kept.any():
        return {"steps": [], "phases": [], "per_bar": 1}
    seconds = np.array([np.nan_to_num(table.column(name)[kept], posinf=0.0) for name in names])
    inside = [index for index, name in enumerate(names) if name[len(PREFIX) :] not in _BESIDE]
    other = np.maximum(step_seconds[kept] - seconds[inside].sum(axis=0), 0.0)
    steps, means = binned_means(table.steps[kept], np.vstack([seconds, other]), most)
    keys = [*(name[len(PREFIX) :] for name in names), "other"]
    order = sorted(range(len(keys)), key=lambda index: _position(keys[index]))
    return {
        "steps": steps.tolist(),
        "per_bar": max(1, round(int(kept.sum()) / len(steps))),
        "phases": [
            {"key": keys[index], "name": words.get(keys[index], keys[index]), "seconds": rounded(means[index])}
            for index in order
        ],
    }


def recent_shares(table: MetricsTable) -> tuple[dict[str, float], float]:
    """Share of each phase in the last steps, and their mean seconds per step (validation and saving included)."""
    by_phase = phases(table, most=10**9)
    totals = {phase["key"]: float(np.sum(phase["seconds"][-_RECENT:])) for phase in by_phase["phases"]}
    seconds = sum(totals.values())
    if seconds <= 0:
        return {}, 0.0
    num_steps = min(_RECENT, len(by_phase["steps"]))
    return {key: total / seconds for key, total in totals.items()}, seconds / num_steps


def what_it_waits_for(table: MetricsTable, timelines: Timelines) -> dict[str, str]:
    """A few words on where the time goes, and what would change it."""
    words, steps = phase_words(timelines), [step for step in timelines.steps if step > 0]
    shares, seconds = recent_shares(table)
    if not shares:
        return {"sentence": "No step has been timed yet.", "advice": ""}
    first, *rest = sorted(shares, key=lambda key: -shares[key])
    more = ", validation and checkpoints included" if any(shares.get(key) for key in _BESIDE) else ""
    sentence = f"{shares[first]:.0%} of a step ({_time(seconds)}{more}) is {words.get(first, first)}"
    second = next((key for key in rest if shares[key] >= 0.1), None)
    sentence += f", then {words.get(second, second)} with {shares[second]:.0%}." if second else "."
    # Of several steps with engines apart: before the end of a run these have nothing left to generate.
    count = min(_RECENT, steps[-1]) if steps and timelines.has_engines else 1
    timeline = timelines.of(steps[-1], count) if steps else None
    busy = {} if timeline is None else busy_shares(timeline["spans"])
    if timeline is not None and "engine" in busy:
        count = len(timeline["starts"])
        sentence += (
            f" In the last {f'{count} steps' if count > 1 else 'step'} the trainer works {busy.get('worker', 0.0):.0%} "
            f"of the time and the engines {busy['engine']:.0%}."
        )
    elif "worker" in busy:
        sentence += f" Workers are busy {busy['worker']:.0%} of the time in step {steps[-1]}"
        sentence += "; otherwise they wait for the driver." if busy["worker"] <= 0.995 else "."
    advice = _ADVICE.get(first, "")
    if first == "gen" and timelines.has_engines:
        advice = _ENGINES_ADVICE if is_asynchronous(table) else _TURNS_ADVICE
    return {"sentence": sentence, "advice": advice}


class Timelines:
    """`timeline.jsonl`: where each step's line is; lines are read when asked for. Call `refresh` before reading."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._places: dict[int, tuple[int, int]] = {}
        self._idle: dict[int, dict[str, float]] = {}
        self._peaks: dict[str, float] = {}
        self.has_engines = False
        self.resumed_after: list[int] = []
        """Steps after which the run was ended and started again."""

    def refresh(self) -> None:
        if self._file.was_replaced():
            self._places, self._idle, self._peaks, self.has_engines = {}, {}, {}, False
        for line in self._file.new_lines():
            if line.value is None or not isinstance(line.value.get("step"), int):
                continue
            self._places[line.value["step"]] = (line.offset, line.size)
            self._idle.pop(line.value["step"], None)
            for span in _spans(line.value):
                self.has_engines |= span["worker"].startswith("engine ")
                if span["memory"] is not None:
                    self._peaks[span["phase"]] = max(self._peaks.get(span["phase"], 0.0), span["memory"])

    @property
    def steps(self) -> list[int]:
        return sorted(self._places)

    @property
    def peaks(self) -> dict[str, float]:
        """GiB by call: the most that any worker had in any step."""
        return dict(self._peaks)

    def of(self, step: int, count: int = 1) -> dict[str, Any] | None:
        """The spans of a step, and of up to `count - 1` before it, in seconds from the start of the first; None when
        it has none. `waits` are the gaps between the spans. While a run is down nobody waits: no step before a resume.
        """
        first = max([step - count, *(end for end in self.resumed_after if end < step)]) + 1
        lines = [value for at in range(first, step + 1) if (value := self._line(at)) is not None]
        if not lines or lines[-1]["step"] != step:
            return None
        begin = min(line["time"] for line in lines)
        spans = [_later(span, line["time"] - begin) for line in lines for span in _spans(line)]
        starts = [{"step": line["step"], "start": line["time"] - begin} for line in lines]
        return {"step": step, "spans": spans, "waits": waits(spans), "starts": starts}

    def idle(self, most: int) -> dict[str, Any]:
        """Shares of a step by what workers and engines waited for, of the last `most` steps."""
        steps = [step for step in self.steps if step > 0][-most:]
        for step in steps:
            if step not in self._idle:
                line = self._line(step)
                self._idle[step] = {} if line is None else idle_shares(_spans(line))
        reasons = [key for key in WAIT_WORDS if any(self._idle[step].get(key, 0.0) > 0 for step in steps)]
        return {
            "steps": steps,
            "waits": [
                {"key": key, "name": WAIT_WORDS[key], "shares": [self._idle[step].get(key, 0.0) for step in steps]}
                for key in reasons
            ],
        }

    def _line(self, step: int) -> dict[str, Any] | None:
        location = self._places.get(step)
        value = None if location is None else parse_object(read_at(self._file.path, *location))
        if value is None:
            return None
        return value if isinstance(value.get("time"), (int, float)) else {**value, "time": 0.0}


def _spans(value: dict[str, Any]) -> list[dict[str, Any]]:
    spans = []
    recorded = value.get("spans")
    for span in recorded if isinstance(recorded, list) else ():
        if isinstance(span, list) and len(span) == 5 and all(isinstance(time, (int, float)) for time in span[2:4]):
            worker, phase, start, end, memory = span
            if str(phase).startswith("_"):  # our own bookkeeping
                continue
            memory = memory if isinstance(memory, (int, float)) else None
            spans.append({"worker": str(worker), "phase": str(phase), "start": start, "end": end, "memory": memory})
    return spans


def _later(span: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {**span, "start": span["start"] + seconds, "end": span["end"] + seconds}


def _position(phase: str) -> int:
    known = list(PHASE_WORDS)
    return known.index(phase) if phase in known else len(known)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


# The plan's phases and the calls in which workers do them.
_CALLS = {
    "rollout": ("generate_sequences",),
    "log-probs": ("compute_log_prob",),
    "reference log-probs": ("compute_ref_log_prob",),
    "values": ("compute_values",),
    "update actor": ("update_actor", "update"),
    "update critic": ("update_critic", "update"),
    "reward model": ("compute_rm_score",),
}


def memory_view(plan: dict[str, Any], peaks: dict[str, float], table: MetricsTable) -> dict[str, Any]:
    """Phases with planned parts and measured GiB. Empty `phases` without a plan."""
    memory = plan.get("memory")
    reported = {
        "allocated": _largest(table, "perf/max_memory_allocated_gb"),
        "reserved": _largest(table, "perf/max_memory_reserved_gb"),
        "host": _largest(table, "perf/cpu_memory_used_gb"),
    }
    if not isinstance(memory, dict):
        return {"phases": [], "device": None, "device_gib": None, "reported": reported, "verdict": None}
    phases = []
    for phase in memory.get("phases", []):
        items = {name: size / GIB for name, size in phase.get("items", {}).items() if size}
        measured = [peaks[call] for call in _CALLS.get(phase["name"], ()) if call in peaks]
        phases.append({"name": phase["name"], "items": items, "measured": max(measured, default=None)})
    return {
        "phases": phases,
        "device": memory.get("device"),
        "device_gib": memory.get("device_bytes", 0) / GIB or None,
        "reported": reported,
        "verdict": memory.get("verdict"),
    }


def _largest(table: MetricsTable, name: str) -> float | None:
    _, values = table.finite(name)
    return float(values.max()) if len(values) else None
