"""The fused head against the plain one, forward and backward: time, and memory where the device counts it.

On CUDA: 20,480 tokens of the 1.5B shape (hidden 1536, vocabulary 151,936) in bfloat16, Triton and PyTorch rows. On a
CPU a smaller shape. Both sides give the same log-probs (checked here). Run: ``python -m benchmarks.fused_head``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dovetail.models.head import LogProbs, fused_linear_log_prob, plain_log_prob_entropy

REPEATS = 5
# The fused head computes the logits twice: four matrix products instead of three. Memory is what it saves. One that
# keeps the gradient of the logits computes them once.
GOAL = "no goal for time on a CPU; never the full logits"
GPU_GOAL = "at least as fast, in a tenth of the memory; with the gradient kept, in a quarter"


def run() -> list[dict[str, Any]]:
    on_gpu = torch.cuda.is_available()
    tokens, hidden_size, vocabulary = (20_480, 1536, 151_936) if on_gpu else (1024, 256, 32_768)
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator, device=device).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, generator=generator, device=device).mul(0.02).to(dtype)
    weight.requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator, device=device)

    def plain(need_entropy: bool) -> LogProbs:
        return plain_log_prob_entropy(hidden @ weight.t(), labels, need_entropy=need_entropy)

    def fused(need_entropy: bool, use_triton: bool, keep_gradient: bool) -> LogProbs:
        options = {"need_entropy": need_entropy, "use_triton": use_triton, "keep_gradient": keep_gradient}
        return fused_linear_log_prob(hidden, weight, labels, **options)

    results = []
    for need_entropy in (False, True):
        what = "log-prob + entropy" if need_entropy else "log-prob"
        plain_step = _step(lambda e=need_entropy: plain(e), hidden, weight)
        kinds = {"pytorch": (False, False)}
        if on_gpu:
            kinds = {"triton": (True, False)} | kinds
            if not need_entropy:
                kinds = {"triton, gradient kept": (True, True)} | kinds
        for kind, how in kinds.items():
            step = _step(lambda e=need_entropy, how=how: fused(e, *how), hidden, weight)
            torch.testing.assert_close(
                fused(need_entropy, *how).log_probs, plain(need_entropy).log_probs, atol=0.1, rtol=0.01
            )
            row = _compare(step, plain_step)
            row["name"] = f"fused head ({kind}) against plain, {what}"
            results.append(row)
    return results


def _step(head: Callable[[], LogProbs], hidden: Tensor, weight: Tensor) -> Callable[[], None]:
    def step() -> None:
        hidden.grad = weight.grad = None
        found = head()
        loss = found.log_probs.sum() if found.entropy is None else (found.log_probs + 0.01 * found.entropy).sum()
        loss.backward()

    return step


def _compare(ours: Callable[[], None], other: Callable[[], None]) -> dict[str, Any]:
    times: tuple[list[float], list[float]] = ([], [])
    peaks = [0.0, 0.0]
    for turn in range(REPEATS + 1):  # in turns; the first turn warms up and is not counted
        for side, step in enumerate((ours, other)):
            seconds, peaks[side] = _measure(step)
            if turn:
                times[side].append(seconds)
    ours_s, other_s = (statistics.median(side) for side in times)
    row = {"ours_s": ours_s, "other_s": other_s, "ratio": other_s / ours_s, "goal": GOAL}
    if peaks[1]:
        row |= {"ours_gib": peaks[0], "other_gib": peaks[1], "goal": GPU_GOAL}
    return row


def _measure(step: Callable[[], None]) -> tuple[float, float]:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        step()
        return time.perf_counter() - start, 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start, (torch.cuda.max_memory_allocated() - held) / 2**30


if __name__ == "__main__":
    for result in run():
        print(result)
