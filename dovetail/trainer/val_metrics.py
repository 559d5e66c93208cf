"""Validation scores of N answers per prompt as mean@N, best@N, worst@N, maj@N and pass@k, per data source.

best@k, worst@k and maj@k for k < N are expectations over drawing k of the N answers, estimated with a fixed seed; @N
they are those of the N answers. `best@k/mean` and `/std` (likewise worst and maj) are verl's: of k answers drawn with
replacement, also for k = N. pass@k, where every value is 0 or 1, is the chance that one of k answers drawn without
replacement is right: the unbiased estimate of https://arxiv.org/abs/2107.03374.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

_NUM_DRAWS = 1000
_SEED = 42
_CORE = ("mean", "best", "maj")


def validation_metrics(
    data_sources: Sequence[str],
    prompt_ids: Sequence[str],
    values: Mapping[str, Sequence[float]],
    answers: Sequence[object] | None = None,
) -> dict[str, float]:
    """`val-core/{source}/{name}/{mean,best,maj}@N` for the main value and `val-aux/...` for everything else.

    `values` maps a name (`reward`, `acc`, ...) to one number per answer; `answers` are what the majority votes on. The
    main value is `acc` where there is one, else `reward`.
    """
    rows: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, prompt) in enumerate(zip(data_sources, prompt_ids, strict=True)):
        rows[str(source)][str(prompt)].append(row)
    summary: dict[str, float] = {}
    for source, prompts in rows.items():
        most = max(len(group) for group in prompts.values())
        for name, numbers in values.items():
            is_pass = all(numbers[row] in (0, 1) for group in prompts.values() for row in group)
            per_prompt = [
                _prompt_metrics(
                    np.asarray([numbers[row] for row in group], dtype=float),
                    None if answers is None else [answers[row] for row in group],
                    most,
                    is_pass=is_pass,
                )
                for group in prompts.values()
            ]
            core = name == ("acc" if "acc" in values else "reward")
            for key in sorted({key for metrics in per_prompt for key in metrics}):
                numbers_of_key = [metrics[key] for metrics in per_prompt if key in metrics]
                is_core = core and key.split("/")[0].endswith(f"@{most}") and key.startswith(_CORE)
                area = "val-core" if is_core else "val-aux"
                summary[f"{area}/{source}/{name}/{key}"] = float(np.mean(numbers_of_key))
    return summary


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Chance that one of `k` of the answers, drawn without replacement, is right."""
    return 1.0 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def _prompt_metrics(numbers: np.ndarray, answers: list[object] | None, most: int, *, is_pass: bool) -> dict[str, float]:
    """Of one prompt. It may have fewer answers with a score than the `most` that others have: its mean counts all the
    same, and it has no best of more than there are.
    """
    count = len(numbers)
    metrics = {f"mean@{most}": float(numbers.mean())}
    if count == 1:
        return metrics
    metrics[f"std@{most}"] = float(numbers.std())
    for k in sorted({*_powers_of_two(most), most}):
        if k > count:
            break
        if is_pass:
            metrics[f"pass@{k}"] = pass_at_k(count, int(numbers.sum()), k)
        draws = _draws(count, k)
        drawn = {"best": numbers[draws].max(axis=1), "worst": numbers[draws].min(axis=1)}
        of_all = {"best": numbers.max(), "worst": numbers.min()}
        if answers is not None:
            drawn["maj"] = np.array([_majority(numbers, answers, draw) for draw in draws])
            of_all["maj"] = _majority(numbers, answers, np.arange(count))
        for name, values in drawn.items():
            metrics[f"{name}@{k}"] = float(values.mean() if k < count else of_all[name])
            metrics[f"{name}@{k}/mean"], metrics[f"{name}@{k}/std"] = float(values.mean()), float(values.std())
    return metrics


@functools.cache
def _draws(count: int, k: int) -> np.ndarray:
    """Rows of `k` answers out of `count`, with replacement. The generator and its seed are verl's."""
    return np.random.RandomState(_SEED).randint(0, count, size=(_NUM_DRAWS, k))


def _majority(numbers: np.ndarray, answers: list[object], draw: np.ndarray) -> float:
    """The value of the most frequent answer; among equals the one drawn first."""
    votes = Counter(str(answers[i]) for i in draw)
    winner = votes.most_common(1)[0][0]
    return float(next(numbers[i] for i in draw if str(answers[i]) == winner))


def _powers_of_two(count: int) -> list[int]:
    return [2**i for i in range(1, count.bit_length()) if 2**i < count]
