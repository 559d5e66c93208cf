"""What an earlier run says of lengths and speeds: one whose generation and training took turns. For `simulate`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.config.errors import ConfigError
from dovetail.config.load import load_config
from dovetail.observability.run_folder import CONFIG, RunFolder, read_json_lines
from dovetail.trainer.async_plan import RecordsError
from dovetail.trainer.simulate import WARM_UP_STEPS, Lengths, Schedule, Speeds, decode_steps

_P99 = statistics.NormalDist().inv_cdf(0.99)


@dataclass(frozen=True)
class RunRecords:
    """Groups in the order of the run; speeds of its devices."""

    groups: Sequence[Lengths]
    prompt_length: float
    speeds: Speeds
    train_devices: int


def read_records(folder: Path) -> RunRecords:
    """From the configuration, `metrics.jsonl` and `rollouts/` of a run folder."""
    if not (folder / CONFIG).exists():
        raise RecordsError(f"{folder} is no run folder: it has no {CONFIG}.")
    try:
        config = load_config([folder / CONFIG]).config
    except ConfigError as error:
        raise RecordsError(f"{folder / CONFIG} cannot be read: {error}") from error
    if config.async_training.mode != "off":
        raise RecordsError(
            f"{folder} is an asynchronous run; its records do not say how long generation takes alone. Give a run with "
            "async_training.mode=off."
        )
    steps = [row for row in RunFolder(folder).read_metrics() if row["step"] > WARM_UP_STEPS]
    groups = [_groups_of(folder / "rollouts" / f"step_{row['step']}.jsonl") for row in steps]
    known = [(row, each) for row, each in zip(steps, groups, strict=True) if each]
    if len(known) < 2:
        raise RecordsError(
            f"{folder} has no two steps with responses in rollouts/ after its first {WARM_UP_STEPS}; let it run longer."
        )
    return RunRecords(
        groups=[lengths for _, each in known for lengths in each],
        prompt_length=statistics.fmean(row["prompt_length/mean"] for row, _ in known),
        speeds=fitted_speeds([row for row, _ in known], [each for _, each in known], Schedule.of(config)),
        train_devices=config.trainer.world_size,
    )


def long_tailed_groups(median: float, p99: float, n: int, longest: int, count: int = 512) -> list[Lengths]:
    """Groups of `n` responses whose lengths are log-normal with this median and 99th percentile, in a fixed order."""
    sigma = math.log(p99 / median) / _P99
    normal = statistics.NormalDist()
    shares = [(index + 0.5) / (count * n) for index in range(count * n)]
    lengths = [min(longest, max(1, round(median * math.exp(sigma * normal.inv_cdf(share))))) for share in shares]
    # A stride that has no factor in common with the number spreads short and long ones without a random number.
    stride = next(step for step in range(int(len(lengths) * 0.618), len(lengths)) if math.gcd(step, len(lengths)) == 1)
    spread = [lengths[index * stride % len(lengths)] for index in range(len(lengths))]
    return [spread[first : first + n] for first in range(0, len(spread), n)]


def fitted_speeds(
    steps: Sequence[Mapping[str, float]], groups: Sequence[Sequence[Lengths]], schedule: Schedule
) -> Speeds:
    """Least squares over synchronous steps: seconds of training by tokens, of generation by decode steps and tokens."""
    tokens = [row["perf/total_num_tokens"] for row in steps]
    train = [row["timing_s/step"] - row["timing_s/gen"] for row in steps]
    train_step_s, train_token_s = _two_factors([1.0] * len(steps), tokens, train)
    prefill_token_s = train_token_s / 3  # a forward is about a third of a forward and a backward
    engines = schedule.num_engines
    decoded = [decode_steps(each, num_engines=engines, max_num_seqs=schedule.max_num_seqs) for each in groups]
    responses = [sum(map(sum, each)) / engines for each in groups]
    prompts = [row["prompt_length/mean"] * sum(map(len, each)) for row, each in zip(steps, groups, strict=True)]
    generate = [
        max(0.0, row["timing_s/gen"] - prefill_token_s * prompt / engines)
        for row, prompt in zip(steps, prompts, strict=True)
    ]
    decode_step_s, decode_token_s = _two_factors(decoded, responses, generate)
    return Speeds(decode_step_s, decode_token_s, train_step_s, train_token_s, prefill_token_s)


def _groups_of(file: Path) -> list[Lengths]:
    groups: dict[str, list[int]] = {}
    for row in read_json_lines(file) if file.exists() else ():
        groups.setdefault(row["uid"], []).append(int(row["response_length"]))
    return list(groups.values())


def _two_factors(first: Sequence[float], second: Sequence[float], goal: Sequence[float]) -> tuple[float, float]:
    """Least squares of goal = a x first + b x second; where one factor would be negative, the other alone."""
    aa, ab, bb = _dot(first, first), _dot(first, second), _dot(second, second)
    ag, bg = _dot(first, goal), _dot(second, goal)
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        a, b = (ag * bb - bg * ab) / determinant, (bg * aa - ag * ab) / determinant
        if a >= 0 and b >= 0:
            return a, b
    # The error of one factor alone is less the more of the goal it explains.
    return (ag / aa, 0.0) if ag * ag / aa > bg * bg / bb else (0.0, bg / bb)


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(first, second, strict=True))
