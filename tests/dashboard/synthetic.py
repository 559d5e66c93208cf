"""Run folders that look like real ones, of any size, written fast."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

GROUP = 8
TOKENS = ("token_", "response_ids")
"""How names of lists with a number per token begin: they stand last in a line."""
_NAMES = (
    *("actor/entropy", "actor/grad_norm", "actor/pg_clipfrac", "actor/ppo_kl", "rollout_corr/k3_kl", "actor/lr"),
    *("critic/score/max", "critic/score/min", "critic/rewards/mean", "critic/advantages/mean", "response_length/max"),
    *("prompt_length/mean", "perf/time_per_step", "perf/throughput", "perf/cpu_memory_used_gb", "actor/pg_loss"),
)


def metrics_row(step: int, steps: int = 100) -> dict[str, Any]:
    """One line of `metrics.jsonl`; the reward rises from 0 to 1."""
    reward = step / max(steps, 1)
    wave = math.sin(step / 7)
    row: dict[str, Any] = {"step": step, "critic/score/mean": reward, "reward/acc/mean": reward}
    row |= {name: 0.001 * (index + 1) * (1.5 + wave) for index, name in enumerate(_NAMES)}
    row |= {"critic/score/max": 1.0, "critic/score/min": 0.0, "actor/entropy": 1.5 - 0.5 * reward}
    row |= {"response_length/mean": 100 + 20 * wave, "response_length/clip_ratio": 0.05, "reward/failed_share": 0.0}
    row |= {
        "timing_s/gen": 3.0 + wave,
        "timing_s/update_actor": 2.0,
        "timing_s/reward": 0.1,
        "timing_s/step": 5.2 + wave,
    }
    if step % 10 == 0:
        row["val-core/toy/acc/mean@1"] = reward
        row |= {"val-aux/response_length/mean": 110 + 10 * wave, "val-aux/response_length/clip_ratio": 0.0625}
    return row


def answer_row(step: int, row: int, *, response: str = "", num_tokens: int = 6) -> dict[str, Any]:
    """One line of `rollouts/step_N.jsonl`: prompts come back every ten steps, row 0 of a group is right."""
    group = row // GROUP
    right = row % GROUP == 0 and group % 4 != 3
    text = response or f"The sum of step {step} in row {row} is {row % 7}."
    ends = [len(text) * (index + 1) // num_tokens for index in range(num_tokens)]
    return {
        "prompt": f"<|im_start|>user\nWhat is {step % 10} + {group}?<|im_end|>\n<|im_start|>assistant\n",
        "response": text,
        "response_length": 5 + row % 40,
        "uid": f"draw-{step}-{group}",
        "data_source": "toy",
        "index": group,
        "ground_truth": str(step % 10 + group),
        "score": float(right),
        "reward_failed": False,
        "advantage": 2.0 if right else -0.3,
        "logprob_gap": 0.001 * (row % 5),
        "finish_reason": "length" if row % 5 == 4 else "stop",
        "acc": float(right),
        "truncated": row % 5 == 4,
        "response_ids": list(range(num_tokens)),
        "token_advantages": [2.0 if right else -0.3] * num_tokens,
        "token_logprob_gaps": [0.01 * index for index in range(num_tokens)],
        "token_entropies": [0.2 * index for index in range(num_tokens)],
        "token_ends": ends,
    }


def timeline_row(step: int) -> dict[str, Any]:
    """One line of `timeline.jsonl`: a driver and two workers."""
    spans: list[list[Any]] = [["driver", "gen", 0.0, 3.0, None], ["driver", "update_actor", 3.1, 5.1, None]]
    for rank in (0, 1):
        spans += [[f"worker {rank}", "generate_sequences", 0.01, 2.5 + rank / 4, 1.5]]
        spans += [[f"worker {rank}", "update_actor", 3.1, 5.0, 2.5]]
    return {"step": step, "time": 1.7e9 + 6 * step, "spans": spans}


def write_async_run(folder: Path, *, steps: int = 8) -> Path:
    """An asynchronous run with an engine of its own: the trainer waits for groups, the engine for draws and weights."""
    write_run(folder, steps=steps, rollouts_per_step=16)
    lags = {f"async/staleness/lag_{lag}": share for lag, share in enumerate([0.5, 0.3, 0.2, *[0.0] * 6])}
    rows = [
        metrics_row(step, steps)
        | lags
        | {"timing_s/gen": 2.1, "timing_s/step": 4.3, "async/staleness/mean": 0.7, "async/staleness/max": 2.0}
        | {"async/effective_sample_size": 0.9, "async/groups_ready": 3.0, "async/groups_running": 12.0}
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(line(row) for row in rows))
    spans: list[list[Any]] = [
        ["driver", "gen", 0.0, 2.0, None],
        ["driver", "update_actor", 2.0, 6.0, None],
        ["worker 0", "update_actor", 2.0, 5.0, 2.5],
        ["engine 0", "generate_groups", 0.0, 4.0, None],
        ["engine 0", "commit_weights", 5.5, 6.0, None],
    ]
    lines = [{"step": step, "time": 1.7e9 + 6 * step, "spans": spans} for step in range(1, steps + 1)]
    (folder / "timeline.jsonl").write_text("".join(line(row) for row in lines))
    for step in range(1, steps + 1):
        answers = [answer_row(step, row) | {"token_versions": [[step - 3, 2], [step - 1, 4]]} for row in range(16)]
        (folder / "rollouts" / f"step_{step}.jsonl").write_text("".join(line(row) for row in answers))
    return folder


def write_agent_run(folder: Path, *, steps: int = 8) -> Path:
    """Three trajectories a group: one finishes, one is two segments long, one meets a dead server."""
    write_run(folder, steps=steps, rollouts_per_step=8)
    agents = {"outcome/finished": 0.67, "outcome/infra": 0.33, "num_turns/mean": 1.7, "num_turns/max": 2.0}
    agents |= {"tool_call_counts/mean": 1.3, "tool_call_counts/failed_share": 0.25}
    agents |= {f"timing_s/agent_loop/{name}/mean": s for name, s in (("generate_sequences", 1.0), ("tool_calls", 0.5))}
    rows = [metrics_row(step, steps) | agents for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(line(row) for row in rows))
    for step in range(1, steps + 1):
        answers = [record for group in range(2) for record in _trajectories(step, group)]
        (folder / "rollouts" / f"step_{step}.jsonl").write_text("".join(line(row) for row in answers))
    return folder


def _trajectories(step: int, group: int) -> list[dict[str, Any]]:
    """The lines of one group, as `docs/agents-design.md` describes them."""
    call = {"kind": "tool", "turn": 0, "seconds": 0.5, "name": "calculator", "arguments": {"expression": "2+3"}}
    messages = [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [{"function": {"name": "calculator"}}]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    turns = [{"kind": "generate", "turn": turn, "seconds": 0.5, "tokens": 3} for turn in (0, 1)]
    slow = call | {"name": "search", "failure": "timeout", "result": "Error: search timed out after 1 s."}
    dead = {"kind": "error", "turn": None, "failure": "infra", "result": "search: no server (3 attempts)"}
    rewritten = {"kind": "branch", "turn": 1, "why": "the template rewrites history"}
    records: list[tuple[int, int, str, dict[str, Any]]] = [
        (0, 0, "finished", {"messages": messages, "events": [turns[0], call | {"result": "5"}, turns[1]]}),
        (1, 0, "finished", {}),
        (1, 1, "finished", {"messages": messages, "events": [turns[0], slow, rewritten, turns[1]]}),
        (2, 0, "infra", {"messages": messages[:2], "events": [turns[0], dead]}),
    ]
    return [
        {
            **{name: value for name, value in answer_row(step, number).items() if not name.startswith(TOKENS)},
            "uid": f"draw-{step}-{group}",
            "score": (1.0, 0.5, 0.0)[number],
            "trajectory": number,
            "segment": segment,
            "outcome": outcome,
            "num_turns": 2,
            "agent_reward": None,
            **record,
            **{name: value for name, value in answer_row(step, number).items() if name.startswith(TOKENS)},
            "token_mask": [1, 1, 0, 0, 1, 1],
        }
        for number, segment, outcome, record in records
    ]


def line(value: dict[str, Any]) -> str:
    """As the run folder writes it."""
    return json.dumps(value, ensure_ascii=False) + "\n"


def write_run(
    folder: Path, *, steps: int = 40, rollouts_per_step: int = 32, config: dict[str, Any] | None = None
) -> Path:
    """A finished run. Answers are written from one template a row, so that a million of them take seconds."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "validation").mkdir()
    write_config(folder, {"trainer": {"total_training_steps": steps, **(config or {})}})
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(line(metrics_row(step, steps)) for step in range(1, steps + 1))
    with (folder / "timeline.jsonl").open("w") as file:
        file.writelines(line(timeline_row(step)) for step in range(max(1, steps - 20), steps + 1))
    events = [{"time": 1.7e9 + step, "kind": "validation", "step": step} for step in range(10, steps + 1, 10)]
    events += [{"time": 1.7e9, "kind": kind, "step": steps // 2} for kind in ("checkpoint", "skipped_step", "resume")]
    (folder / "events.jsonl").write_text("".join(line(event) for event in events))
    mark = 987654321  # stands for the step in the template
    template = "".join(line(answer_row(mark, row)) for row in range(rollouts_per_step))
    template = template.replace(f"What is {mark % 10} +", "What is @@ +")
    for step in range(1, steps + 1):
        text = template.replace(str(mark), str(step)).replace("What is @@ +", f"What is {step % 10} +")
        (folder / "rollouts" / f"step_{step}.jsonl").write_text(text)
    for step in (10, steps):
        rows = [validation_row(step, index) for index in range(6)]
        (folder / "validation" / f"step_{step}.jsonl").write_text("".join(line(row) for row in rows))
    return folder


def validation_row(step: int, index: int) -> dict[str, Any]:
    return {
        "uid": f"val-{index}",
        "data_source": "toy",
        "prompt": f"What is {index} + 1?",
        "response": f"At step {step} I say {index + 1}.",
        "ground_truth": str(index + 1),
        "values": {"reward": float(step > 10), "acc": float(step > 10)},
        "pred": str(index + 1),
        "length": 9,
        "failed": False,
    }


def write_config(folder: Path, values: dict[str, Any]) -> None:
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
