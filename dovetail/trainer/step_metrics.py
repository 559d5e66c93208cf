"""What is reported about a step: rewards, lengths, speed. Names are the ones users already plot."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol import DataProto
from dovetail.protocol.trajectories import row_totals, trajectories_of

Metrics = dict[str, float]

# Phases whose time is also given per token, and whether prompt tokens count (not for generation).
_PER_TOKEN = {"gen": False, "old_log_prob": True, "ref": True, "values": True, "adv": True, "update_critic": True}
_PER_TOKEN["update_actor"] = True

# What workers measure, under the names users plot. Both count in GiB.
_MEMORY_NAMES = {
    "memory/peak_allocated_gib": "perf/max_memory_allocated_gb",
    "memory/peak_reserved_gib": "perf/max_memory_reserved_gb",
    "memory/host_peak_gib": "perf/cpu_memory_used_gb",
}


def data_metrics(batch: DataProto, *, use_critic: bool, max_response_length: int) -> Metrics:
    """Scores and rewards of all rows that have one, trained on or filtered out; advantages, returns and values of the
    tokens that are trained on; lengths of everything. The batch is as wide as its longest response, which may be
    shorter than `max_response_length`.
    """
    columns = batch.tensors
    width = columns["responses"].shape[1]
    attention = columns["attention_mask"].bool()
    mask = columns["response_mask"].bool()
    scored = ~columns["reward_failed"].bool()
    trajectories = trajectories_of(batch)
    if trajectories is not None:  # each counts once
        scored &= torch.zeros(len(batch), dtype=torch.bool).index_fill_(0, torch.tensor(trajectories.last), True)
    metrics: Metrics = {}
    metrics |= spread("critic/score", row_totals(batch, "token_level_scores")[scored])
    metrics |= spread("critic/rewards", row_totals(batch, "token_level_rewards")[scored])
    metrics |= spread("critic/advantages", columns["advantages"][mask])
    metrics |= spread("critic/returns", columns["returns"][mask])
    if use_critic:
        values, returns = columns["values"][mask], columns["returns"][mask]
        metrics |= spread("critic/values", values)
        variance = returns.var(unbiased=False)
        unexplained = (returns - values).var(unbiased=False)
        metrics["critic/vf_explained_var"] = float(1 - unexplained / (variance + 1e-5)) if len(returns) else 0.0
    response_lengths = attention[:, -width:].sum(dim=1).float()
    prompt_lengths = attention[:, :-width].sum(dim=1).float()
    metrics |= spread("response_length", response_lengths)
    metrics["response_length/clip_ratio"] = _share(response_lengths >= max_response_length)
    metrics["response/aborted_ratio"] = _share(response_lengths == 0)
    metrics |= spread("prompt_length", prompt_lengths)
    metrics["prompt_length/clip_ratio"] = _share(prompt_lengths >= attention.shape[1] - width)
    return metrics


def timing_metrics(seconds: Mapping[str, float], num_tokens: int, num_generated: int) -> Metrics:
    """`timing_s/*`, and `timing_per_token_ms/*` for the phases that work token by token.

    `num_generated` counts all generated tokens of the step: dynamic sampling trains on only a part of them.
    """
    metrics = {f"timing_s/{name}": value for name, value in seconds.items()}
    for name, with_prompt in _PER_TOKEN.items():
        tokens = num_tokens if with_prompt else num_generated
        if name in seconds and tokens:
            metrics[f"timing_per_token_ms/{name}"] = seconds[name] * 1000 / tokens
    return metrics


def throughput_metrics(seconds: float, num_tokens: int, num_devices: int) -> Metrics:
    """Tokens per second and device over the whole step."""
    return {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / (seconds * num_devices) if seconds else 0.0,
    }


def update_metrics(output: DataProto, before: Mapping[str, float] | None = None) -> Metrics:
    """What an update reported. Ranks report equal numbers, except for memory, where the largest matters.

    `before` are the metrics of the step so far: the critic's processes report memory under the same names.
    """
    reported = output.meta_info["metrics"]
    largest = {name: max(values) if isinstance(values, list) else values for name, values in reported.items()}
    earlier = {name: value for name, value in (before or {}).items() if name.startswith("memory/")}
    return largest | {name: max(value, largest.get(name, value)) for name, value in earlier.items()}


def memory_metrics(reported: Mapping[str, float]) -> Metrics:
    """`perf/max_memory_*` of the fullest device and `perf/cpu_memory_used_gb` of the largest process."""
    return {name: reported[measured] for measured, name in _MEMORY_NAMES.items() if measured in reported}


def token_counts(batch: DataProto) -> tuple[int, int]:
    """Tokens of prompts and responses together, and of responses alone."""
    attention = batch.tensors["attention_mask"]
    width = batch.tensors["responses"].shape[1]
    return int(attention.sum()), int(attention[:, -width:].sum())


def spread(name: str, values: Tensor | np.ndarray) -> Metrics:
    """Mean, largest and smallest; nothing of no values."""
    if not len(values):
        return {}
    values = values.float() if isinstance(values, Tensor) else values
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _share(flags: Tensor) -> float:
    return float(flags.to(torch.float32).mean()) if len(flags) else 0.0
