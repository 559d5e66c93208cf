"""Scores of a saved model on a data set: a run that only validates (`trainer.val_only`), and a summary of it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dovetail.config.root import DovetailConfig
from dovetail.observability.console import make_console
from dovetail.observability.run_folder import SCORES, read_json_lines, write_text
from dovetail.trainer.run import run_training

_SHOWN = ("mean@", "pass@", "best@", "maj@")


@dataclass(frozen=True)
class SourceScores:
    """Of one data source. `scores` has `mean@N` and, with N > 1 responses to a prompt, `pass@k`, `best@k`, `maj@k`."""

    data_source: str
    value: str
    """What the scores are of: `acc` where the reward function returns it, else `reward`."""
    prompts: int
    responses: int
    failed: int
    """Responses that could not be scored; they are in no score."""
    mean_tokens: float
    scores: dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """`folder` has the summary in `eval.json` and every response in `validation/`."""

    folder: Path
    step: int
    sources: list[SourceScores]


def evaluate(config: DovetailConfig, *, model: str, use_ray: bool = False) -> Evaluation:
    """Validate as `config` says (`SavedModel.config` builds it) and write the summary into its run folder.

    `model` is the name that the summary gives what was evaluated.
    """
    result = run_training(config, use_ray=use_ray, console=functools.partial(make_console, live=False))
    rows = list(read_json_lines(result.folder / "validation" / f"step_{result.steps}.jsonl"))
    sources = [
        _of_source(source, [row for row in rows if row["data_source"] == source], result.validation)
        for source in dict.fromkeys(row["data_source"] for row in rows)
    ]
    evaluation = Evaluation(result.folder, result.steps, sources)
    _write(evaluation, config, model, result.validation)
    return evaluation


def _of_source(source: str, rows: list[dict[str, Any]], metrics: Mapping[str, float]) -> SourceScores:
    value = "acc" if any(name.startswith(f"val-core/{source}/acc/") for name in metrics) else "reward"
    scores = {}
    for area in ("val-core", "val-aux"):
        prefix = f"{area}/{source}/{value}/"
        named = {name.removeprefix(prefix): number for name, number in metrics.items() if name.startswith(prefix)}
        # `best@4`, not verl's `best@4/mean` beside it.
        scores |= {name: number for name, number in named.items() if name.startswith(_SHOWN) and "/" not in name}
    return SourceScores(
        data_source=source,
        value=value,
        prompts=len({row["uid"] for row in rows}),
        responses=len(rows),
        failed=sum(row["failed"] for row in rows),
        mean_tokens=sum(row["length"] for row in rows) / len(rows),
        scores=dict(sorted(scores.items(), key=_order)),
    )


def _order(score: tuple[str, float]) -> tuple[int, int]:
    name, _, count = score[0].partition("@")
    return _SHOWN.index(f"{name}@"), int(count)


def _write(evaluation: Evaluation, config: DovetailConfig, model: str, metrics: Mapping[str, float]) -> None:
    rollout = config.actor_rollout_ref.rollout
    summary = {
        "model": model,
        "step": evaluation.step,
        "data": list(config.data.val_paths),
        "engine": rollout.name,
        "sampling": {**rollout.val_kwargs.model_dump(), "max_tokens": rollout.response_length},
        "seed": config.trainer.seed,
        "sources": [asdict(source) for source in evaluation.sources],
        "metrics": dict(metrics),
    }
    write_text(evaluation.folder / SCORES, json.dumps(summary, indent=1) + "\n")
