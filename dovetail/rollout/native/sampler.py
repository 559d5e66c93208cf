"""Draw the next token of every row and its log-prob from the logits. Knows nothing of requests, caches or models.

A draw is an exponential race (Gumbel-max in another form): token i wins with score weight_i / E_i, where the
exponentials E are a function of (seed, sample, position). Unlike a walk along the cumulative sum, a race hardly notices
the last bits of the logits: two distributions at total variation t pick different tokens with probability at most about
4t, whatever the vocabulary, so results survive matmuls that round differently at another batch size. The race is run in
two rounds, first among blocks of 128 tokens by their total weight, then inside the winning block. That is the same
distribution (chain rule) for V/128 + 128 random numbers a row instead of V.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dovetail.rollout.base import NotFiniteError, SamplingParams
from dovetail.rollout.native.noise import exponentials, fold, stream_key

# Part of what a seed means: another value gives other, equally distributed, samples.
BLOCK = 128
# Top-p needs the largest weights in order; nearly always they are among this many. Rows with flatter distributions
# are sorted in full.
NUM_CANDIDATES = 1024
# Rows that are copied to float32 together: 40 MB with a vocabulary of 152 k.
_RAW_ROWS = 64


class Filters(NamedTuple):
    """What rows are filtered by, by slot: top-k (int32, the vocabulary's size or more for none), top-p (float64), min-p
    (float32), and whether log-probs are those after filtering (int32)."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    processed: torch.Tensor


class MaskRows(NamedTuple):
    """How rows that keep their sampling mask are filtered, by row or by slot: top-k (int32, 0 for rows that keep none),
    top-p (float64), min-p (float32), temperature (float32)."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    temperature: torch.Tensor


_MASK_DTYPES = (torch.int32, torch.float64, torch.float32, torch.float32)


def mask_filters(params: Sequence[SamplingParams]) -> list[tuple[float, ...]]:
    """The four columns of `MaskRows`."""
    rows = [(p.top_k, p.top_p, p.min_p, p.temperature) if p.keep_mask else (0, 1.0, 0.0, 1.0) for p in params]
    return list(zip(*rows, strict=True))


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of the rows of one batch, on the device. Rebuilt only when rows come or go."""

    keys: torch.Tensor
    temperature: torch.Tensor | None  # None when every row has 1
    greedy: torch.Tensor | None  # None when no row is greedy
    all_greedy: bool
    filtered_rows: torch.Tensor | None  # indices of rows with top-k, top-p or min-p
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    max_top_k: int
    processed: torch.Tensor | None
    raw: torch.Tensor | None
    masks: MaskRows | None  # None when no row keeps its mask
    mask_width: int  # the most ids that any of them keeps

    @classmethod
    def build(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], sample_indices: Sequence[int], device: torch.device
    ) -> SamplingRows:
        temperature = [1.0 if p.greedy else p.temperature for p in params]
        greedy = [p.greedy for p in params]
        # Rows that keep their mask are filtered before (`cut_to_masks`).
        filtered = [row for row, p in enumerate(params) if p.truncates and not p.keep_mask]
        keys = [stream_key(seed, index) for seed, index in zip(seeds, sample_indices, strict=True)]
        processed = [p.logprobs == "processed" and p.truncates for p in params]
        raw = [p.logprobs == "raw" for p in params]
        no_top_k = torch.iinfo(torch.int64).max
        mask_width = max((p.top_k for p in params if p.keep_mask), default=0)

        def tensor(values: Sequence[float | int | bool], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            keys=tensor(keys, torch.int64),
            temperature=tensor(temperature, torch.float32) if any(t != 1 for t in temperature) else None,
            greedy=tensor(greedy, torch.bool) if any(greedy) else None,
            all_greedy=all(greedy),
            filtered_rows=tensor(filtered, torch.int64) if filtered else None,
            top_k=tensor([params[row].top_k if params[row].top_k > 0 else no_top_k for row in filtered], torch.int64),
            top_p=tensor([params[row].top_p for row in filtered], torch.float64),
            min_p=tensor([params[row].min_p for row in filtered], torch.float32),
            max_top_k=max((params[row].top_k for row in filtered), default=0),
            processed=tensor(processed, torch.bool) if any(processed) else None,
            raw=tensor(raw, torch.bool) if any(raw) else None,
            masks=MaskRows._make(map(tensor, mask_filters(params), _MASK_DTYPES)) if mask_width else None,
            mask_width=mask_width,
        )

    def log_prob_temperatures(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """The temperature under which the log-prob of each row is wanted."""
        ones = torch.ones(num_rows, device=device)
        temperatures = ones if self.temperature is None else self.temperature
        return temperatures if self.raw is None else torch.where(self.raw, ones, temperatures)


def sample(logits: torch.Tensor, rows: SamplingRows, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Next token ids (int64) and their log-probs (float32) from logits (rows, vocab), which are overwritten.

    `positions` is the place of the new token in its whole sequence: a response continued later as a longer prompt
    goes on with the same random numbers.
    """
    # One buffer from here to the weights: with a large vocabulary each fresh one costs more than what is done in it.
    scores = logits if logits.dtype == torch.float32 else logits.float()
    greedy_tokens = scores.argmax(dim=-1) if rows.greedy is not None else None
    raw = scores.clone() if rows.raw is not None else None
    if rows.temperature is not None:
        scores.div_(rows.temperature.unsqueeze(-1))
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    blocks = _block_sums(weights)
    log_total = blocks.sum(dim=-1, dtype=torch.float64).log()

    log_kept = log_total
    if rows.filtered_rows is not None:
        kept = filter_weights(weights[rows.filtered_rows], rows.top_k, rows.top_p, rows.min_p, rows.max_top_k)
        weights[rows.filtered_rows] = kept
        blocks[rows.filtered_rows] = _block_sums(kept)
        log_kept = blocks.sum(dim=-1, dtype=torch.float64).log()

    if greedy_tokens is not None and rows.all_greedy:
        tokens = greedy_tokens
    else:
        tokens = _race(weights, blocks, fold(rows.keys, positions))
        if greedy_tokens is not None and rows.greedy is not None:
            tokens = torch.where(rows.greedy, greedy_tokens, tokens)

    chosen = tokens.unsqueeze(-1)
    # A token that won a race has a weight well above the smallest float, so its logarithm is exact to rounding.
    log_weight = weights.gather(-1, chosen).squeeze(-1).double().log()
    log_probs = log_weight - log_total
    if rows.processed is not None:
        log_probs = torch.where(rows.processed, log_weight - log_kept, log_probs)
    if rows.raw is not None and raw is not None:
        log_probs = torch.where(rows.raw, raw_log_probs(raw, tokens).double(), log_probs)
    return tokens, log_probs.float()


def cut_to_masks(logits: torch.Tensor, masks: MaskRows, width: int) -> torch.Tensor:
    """Filter the rows that keep their mask: their logits (rows, vocab) become -inf where nothing was kept.

    Returns what was kept, int32 (rows, width), filled up with -1. Exactly these ids can be drawn: where more tokens tie
    with the last one than top-k has room for, some of them go. Nothing here depends on values on the host, so that a
    CUDA graph can hold it.
    """
    width = min(width, logits.shape[-1])
    values, ids = logits.topk(width, dim=-1)
    weights = (values.float() - values[:, :1].float()).div_(masks.temperature.unsqueeze(-1)).exp_()
    places = torch.arange(width, device=logits.device)
    in_top_k = places < masks.top_k.unsqueeze(-1)
    sums = weights.double().mul_(in_top_k).cumsum_(dim=-1)
    # A token stays while the tokens before it have not yet reached the wanted mass.
    kept = in_top_k & ((sums - weights) < masks.top_p.unsqueeze(-1) * sums[:, -1:])
    kept &= weights >= masks.min_p.unsqueeze(-1)
    has_mask = (masks.top_k > 0).unsqueeze(-1)
    logits.masked_fill_(has_mask.expand_as(logits).scatter(-1, ids, ~kept & has_mask), -torch.inf)
    return torch.where(kept, ids, -1).int()


def raw_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float32 log-probs of a token of each row at temperature 1. Copies no more than a few rows at a time."""
    totals = [part.float().logsumexp(dim=-1) for part in logits.split(_RAW_ROWS)]
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float() - torch.cat(totals)


def require_finite(log_probs: Iterable[float]) -> None:
    """NotFiniteError for tokens that were drawn from logits that are NaN or infinite."""
    if not math.isfinite(sum(log_probs)):
        raise NotFiniteError(
            "the model's logits are not finite (NaN or infinity): its weights or its activations are not. Look at the "
            "loss and the gradients of the training steps before, or use a dtype with a wider range."
        )


def race_blocks(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """One draw per row from weights (rows, vocab) that need not add up to 1, with the row's own random numbers."""
    return _race(weights, _block_sums(weights), keys)


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    short = -weights.shape[-1] % BLOCK
    padded = F.pad(weights, (0, short)) if short else weights
    return padded.view(weights.shape[0], -1, BLOCK).sum(dim=-1)


def _race(weights: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    block = (blocks / exponentials(keys, blocks.shape[-1])).argmax(dim=-1)
    offsets = torch.arange(BLOCK, device=weights.device)
    columns = block.unsqueeze(-1) * BLOCK + offsets
    inside = columns < weights.shape[-1]
    candidates = weights.gather(-1, columns.clamp(max=weights.shape[-1] - 1)).masked_fill_(~inside, 0)
    # Negative counters, so that the second round never repeats a number of the first.
    scores = candidates / exponentials(fold(keys, -2 - block), BLOCK)
    return block * BLOCK + scores.argmax(dim=-1)


def filter_weights(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, max_top_k: int
) -> torch.Tensor:
    """Zero what top-k, top-p and min-p remove. All three amount to one smallest weight per row; ties with it stay.

    The largest weight of a row is 1. `max_top_k` is the largest of `top_k` that removes anything, 0 if none does.
    """
    vocab = weights.shape[-1]
    threshold = _threshold(weights, top_k, top_p, min(vocab, max(max_top_k, NUM_CANDIDATES)))
    if threshold is None:
        threshold = _threshold(weights, top_k, top_p, vocab)
        assert threshold is not None, "with every token a candidate the nucleus is always complete"
    # The largest weight of a row is 1, so min-p is a threshold as it stands.
    threshold = torch.maximum(threshold, min_p)
    return weights.masked_fill(weights < threshold.unsqueeze(-1), 0)


def _threshold(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, num_candidates: int
) -> torch.Tensor | None:
    """Smallest weight that top-k and top-p keep, or None if more candidates are needed to know it."""
    vocab = weights.shape[-1]
    largest = weights.topk(num_candidates, dim=-1).values
    sums = largest.cumsum(dim=-1, dtype=torch.float64)
    limit = top_k.clamp(max=vocab).unsqueeze(-1)
    in_top_k = torch.arange(num_candidates, device=weights.device) < limit
    whole = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    left_by_top_k = torch.where(limit < vocab, sums.gather(-1, limit.clamp(max=num_candidates) - 1), whole)
    wanted = top_p.unsqueeze(-1) * left_by_top_k
    # A token stays while the tokens before it have not yet reached the wanted mass.
    keep = in_top_k & ((sums - largest) < wanted)
    unlimited = (top_p >= 1) & (top_k >= vocab)
    if num_candidates < vocab:
        complete = (sums[:, -1:] >= wanted).squeeze(-1) | (top_k <= num_candidates) | unlimited
        if not bool(complete.all()):
            return None
    count = keep.sum(dim=-1, keepdim=True)
    # NaN compares with nothing, and nothing is kept: whoever reads the log-probs sees it.
    threshold = largest.gather(-1, (count - 1).clamp(min=0)).squeeze(-1)
    return threshold.masked_fill(unlimited, 0)
