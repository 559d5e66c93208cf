"""Run folders that look like real ones, of any size, written fast."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

GROUP = 8
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
