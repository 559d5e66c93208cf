"""Group estimators against a plain loop over rows, on a large batch: 16,384 answers of 2,048 tokens, 16 per prompt.

Both sides compute the same advantages (checked here) from the same tensors in the same process. The goal is a ratio of
medians of at least 10. Ours is bound by writing the 128 MiB result, so it wants a machine whose memory is not busy: the
loop is bound by the interpreter and hardly notices.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from dovetail.algorithms import get_adv_estimator_fn

NUM_ROWS, WIDTH, GROUP_SIZE = 16_384, 2_048, 16
REPEATS = 5
GOAL = "at least 10 times as fast as the row loop"
ESTIMATORS = ("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")


def run() -> list[dict[str, Any]]:
    rewards, mask, uid = _batch()
    results: list[dict[str, Any]] = []
    for name in ESTIMATORS:
        estimator = get_adv_estimator_fn(name)
        ours: list[float] = []
        other: list[float] = []
        for turn in range(REPEATS + 1):  # in turns, so that a busy machine slows both sides
            (result, _), our_seconds = _timed(estimator, token_level_rewards=rewards, response_mask=mask, uid=uid)
            expected, other_seconds = _timed(_row_loop, name, rewards, mask, uid)
            torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
            del result, expected  # 128 MiB each, freed outside the timed part
            if turn > 0:  # the first turn warms up
                ours.append(our_seconds)
                other.append(other_seconds)
        ours_s, other_s = statistics.median(ours), statistics.median(other)
        results.append({"name": name, "ours_s": ours_s, "other_s": other_s, "ratio": other_s / ours_s, "goal": GOAL})
    return results


def _batch() -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, WIDTH + 1, (NUM_ROWS,), generator=generator)
    mask = (torch.arange(WIDTH) < lengths.unsqueeze(-1)).float()
    scores = torch.randint(0, 2, (NUM_ROWS, 1), generator=generator).float()
    scores += 0.1 * torch.rand(NUM_ROWS, 1, generator=generator)
    rewards = torch.zeros(NUM_ROWS, WIDTH).scatter_(1, lengths.unsqueeze(-1) - 1, scores)
    uid = np.array([f"prompt-{row // GROUP_SIZE:06d}" for row in range(NUM_ROWS)], dtype=object)
    return rewards, mask, uid


def _timed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call(*args, **kwargs)
    return result, time.perf_counter() - start


def _row_loop(name: str, rewards: torch.Tensor, mask: torch.Tensor, uid: Iterable[object]) -> torch.Tensor:
    """What one writes first: a dictionary of lists, one row at a time."""
    rows_of: dict[object, list[int]] = defaultdict(list)
    scores, lengths = [], []
    for row, group in enumerate(uid):
        rows_of[group].append(row)
        scores.append(rewards[row].sum())
        if name == "opo":
            lengths.append(mask[row].sum())
    advantages = torch.zeros_like(rewards)
    num_scored = max(sum(1 for score in scores if score != 0), 1) if name == "gpg" else 1
    for rows in rows_of.values():
        group_scores = torch.stack([scores[row] for row in rows])
        mean, std, best = group_scores.mean(), group_scores.std(), group_scores.topk(2)
        baseline = mean if name != "opo" else _length_weighted_mean(group_scores, [lengths[row] for row in rows])
        for position, row in enumerate(rows):
            score = scores[row]
            if name == "grpo":
                value = (score - mean) / (std + 1e-6)
            elif name == "grpo_passk":
                lead = (best.values[0] - best.values[1]) / (std + 1e-6)
                value = lead if position == best.indices[0] else torch.zeros(())
            elif name == "rloo":
                value = (score - mean) * len(rows) / (len(rows) - 1)
            elif name == "opo":
                value = score - baseline
            elif name == "gpg":
                value = (score - mean) * len(scores) / num_scored
            else:
                value = score - mean
            advantages[row] = value * mask[row]
    return _whiten_rows(advantages, mask) if name == "reinforce_plus_plus_baseline" else advantages


def _length_weighted_mean(scores: torch.Tensor, lengths: list[torch.Tensor]) -> torch.Tensor:
    weights = torch.stack(lengths)
    return (weights * scores).sum() / weights.sum()


def _whiten_rows(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    num_tokens = sum(float(row.sum()) for row in mask)
    mean = sum(float(row.sum()) for row in advantages) / num_tokens
    squares = sum(float(((row - mean).square() * kept).sum()) for row, kept in zip(advantages, mask, strict=True))
    scale = (squares / (num_tokens - 1) + 1e-8) ** -0.5
    for row, kept in zip(advantages, mask, strict=True):
        row.sub_(mean).mul_(scale).mul_(kept)
    return advantages


def _print_table(results: list[dict[str, Any]]) -> None:
    print(f"{'estimator':32} {'ours (s)':>10} {'row loop (s)':>13} {'ratio':>8}   goal")
    for result in results:
        print(
            f"{result['name']:32} {result['ours_s']:10.4f} {result['other_s']:13.4f} {result['ratio']:8.1f}   "
            f"{result['goal']}"
        )


if __name__ == "__main__":
    _print_table(run())
