"""Validation scores of N answers per prompt as mean@N, best@N, worst@N and maj@N, per data source.

best@k, worst@k and maj@k for k < N are expectations over drawing k of the N answers, estimated with a fixed seed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

_NUM_DRAWS = 1000


def validation_metrics(
    data_sources: Sequence[str],
    prompt_ids: Sequence[str],
    values: Mapping[str, Sequence[float]],
    answers: Sequence[object] | None = None,
    *,
    seed: int = 42,
) -> dict[str, float]:
    """`val-core/{source}/{name}/{mean,best,maj}@N` for the main value and `val-aux/...` for everything else.

    `values` maps a name (`reward`, `acc`, ...) to one number per answer; `answers` are what the majority votes on. The
    main value is `acc` where there is one, else `reward`.
    """
    rows: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, prompt) in enumerate(zip(data_sources, prompt_ids, strict=True)):
        rows[str(source)][str(prompt)].append(row)
    found: dict[str, float] = {}
    rng = np.random.default_rng(seed)
    for source, prompts in rows.items():
        most = max(len(group) for group in prompts.values())
        for name, numbers in values.items():
            per_prompt = [
                _prompt_metrics(
                    np.asarray([numbers[row] for row in group], dtype=float),
                    None if answers is None else [answers[row] for row in group],
                    rng,
                    most,
                )
                for group in prompts.values()
            ]
            core = name == ("acc" if "acc" in values else "reward")
            for key in sorted({key for metrics in per_prompt for key in metrics}):
                numbers_of_key = [metrics[key] for metrics in per_prompt if key in metrics]
                is_core = core and key.endswith(f"@{most}") and not key.startswith(("std", "worst"))
                area = "val-core" if is_core else "val-aux"
                found[f"{area}/{source}/{name}/{key}"] = float(np.mean(numbers_of_key))
    return found


def _prompt_metrics(
    numbers: np.ndarray, answers: list[object] | None, rng: np.random.Generator, most: int
) -> dict[str, float]:
    """Of one prompt. It may have fewer answers with a score than the `most` that others have: its mean counts all the
    same, and it has no best of more than there are.
    """
    count = len(numbers)
    found = {f"mean@{most}": float(numbers.mean())}
    if count == 1:
        return found
    found[f"std@{most}"] = float(numbers.std())
    for k in sorted({*_powers_of_two(most), most}):
        if k > count:
            break
        draws = rng.integers(0, count, size=(_NUM_DRAWS, k)) if k < count else np.arange(count)[None]
        found[f"best@{k}"] = float(numbers[draws].max(axis=1).mean())
        found[f"worst@{k}"] = float(numbers[draws].min(axis=1).mean())
        if answers is not None:
            found[f"maj@{k}"] = float(np.mean([_majority(numbers, answers, draw) for draw in draws]))
    return found


def _majority(numbers: np.ndarray, answers: list[object], draw: np.ndarray) -> float:
    """The value of the most frequent answer; among equals the one drawn first."""
    votes = Counter(str(answers[i]) for i in draw)
    winner = votes.most_common(1)[0][0]
    return float(next(numbers[i] for i in draw if str(answers[i]) == winner))


def _powers_of_two(count: int) -> list[int]:
    return [2**i for i in range(1, count.bit_length()) if 2**i < count]
