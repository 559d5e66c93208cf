"""The native sampler: its distribution, its log-probs, its random numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail.rollout.base import SamplingParams
from dovetail.rollout.native.noise import exponentials, fold, stream_key
from dovetail.rollout.native.sampler import SamplingRows, cut_to_masks, raw_log_probs, sample
from dovetail.rollout.request_rules import check_logprobs

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
NUM_DRAWS = 12_000


def _logits(vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def _draw(logits: torch.Tensor, params: SamplingParams, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` draws from one distribution, one per position of one request."""
    rows = SamplingRows.build([params] * count, [7] * count, [0] * count, CPU)
    return sample(logits.repeat(count, 1), rows, torch.arange(count))


def _exact(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution written out plainly: temperature, top-k, top-p on what is left, min-p."""
    probs = (logits.double() / params.temperature).softmax(dim=-1)
    order = probs.argsort(descending=True)
    kept = order[: params.top_k] if params.top_k > 0 else order
    mass = probs[kept] / probs[kept].sum()
    kept = kept[(mass.cumsum(0) - mass) < params.top_p]
    kept = kept[probs[kept] >= params.min_p * probs.max()]
    out = torch.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


def _chi_square_p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Probability of a statistic this large if the draws follow `probs` (regularised upper incomplete gamma)."""
    expected = probs * counts.sum()
    # Cells with few expected draws are pooled: the statistic's distribution holds for large cells only.
    rare = expected < 8
    observed = torch.cat([counts[~rare], counts[rare].sum(0, keepdim=True)]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor(len(expected) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


@pytest.mark.parametrize("vocab", [6, 300])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.73),
        SamplingParams(min_p=0.21),
        SamplingParams(temperature=1.3, top_k=5, top_p=0.83, min_p=0.07),
    ],
    ids=["plain", "cold", "hot", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_exact_distribution(vocab: int, params: SamplingParams) -> None:
    logits = _logits(vocab)
    probs = _exact(logits, params)
    tokens, _ = _draw(logits, params, NUM_DRAWS)
    counts = tokens.bincount(minlength=vocab)
    assert counts[probs == 0].sum() == 0
    assert _chi_square_p_value(counts, probs) > 1e-3


def test_the_chi_square_test_itself_rejects_a_wrong_distribution() -> None:
    logits = _logits(40)
    tokens, _ = _draw(logits, SamplingParams(temperature=1.2), NUM_DRAWS)
    assert _chi_square_p_value(tokens.bincount(minlength=40), _exact(logits, SamplingParams())) < 1e-6


def test_top_p_of_a_flat_distribution_wider_than_the_candidates_is_exact() -> None:
    logits = _logits(4096) * 0.05
    params = SamplingParams(top_p=0.9)
    tokens, _ = _draw(logits, params, 1600)
    assert _exact(logits, params)[tokens].min() > 0
    kept = torch.zeros(4096, dtype=torch.bool)
    kept[tokens] = True
    assert kept.sum() > 1024  # more than the sampler sorts at first


def test_log_probs_are_under_temperature_before_truncation_by_default() -> None:
    logits = _logits(50)
    params = SamplingParams(temperature=0.7, top_k=5, top_p=0.8)
    tokens, log_probs = _draw(logits, params, 200)
    torch.testing.assert_close(log_probs, (logits / 0.7).log_softmax(-1)[tokens], atol=1e-6, rtol=0)


class _Sizes(TorchDispatchMode):
    """Elements of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.made += [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_raw_log_probs_copy_a_few_rows_at_a_time(dtype: torch.dtype) -> None:
    logits = (_logits(200 * 1000) * 4).view(200, 1000).to(dtype)
    tokens = torch.arange(200) * 5
    with _Sizes() as sizes:
        found = raw_log_probs(logits, tokens)
    expected = logits.double().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    assert max(sizes.made) <= 64 * 1000


def test_processed_log_probs_are_after_truncation_and_raw_ones_at_temperature_one() -> None:
    logits = _logits(50)
    cut = SamplingParams(temperature=0.7, top_k=5, logprobs="processed")
    tokens, log_probs = _draw(logits, cut, 200)
    torch.testing.assert_close(log_probs.double(), _exact(logits, cut)[tokens].log(), atol=1e-6, rtol=0)
    tokens, log_probs = _draw(logits, SamplingParams(temperature=0.7, top_k=5, logprobs="raw"), 200)
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[tokens], atol=1e-6, rtol=0)


def test_greedy_takes_the_largest_logit_with_its_log_prob_at_temperature_one() -> None:
    logits = _logits(50)
    tokens, log_probs = _draw(logits, SamplingParams(temperature=0.0, top_k=3), 4)
    assert tokens.tolist() == [int(logits.argmax())] * 4
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).max().expand(4), atol=1e-6, rtol=0)


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=2),
        SamplingParams(temperature=0.5),
        SamplingParams(top_p=0.5, min_p=0.1, logprobs="processed"),
    ]
    logits = torch.stack([_logits(70, seed) for seed in range(4)])
    positions = torch.tensor([3, 9, 4, 1])
    tokens, log_probs = sample(logits.clone(), SamplingRows.build(params, [1, 2, 3, 4], [0, 1, 0, 2], CPU), positions)
    for row, one in enumerate(params):
        rows = SamplingRows.build([one], [row + 1], [[0, 1, 0, 2][row]], CPU)
        alone = sample(logits[row : row + 1].clone(), rows, positions[row : row + 1])
        assert alone[0].item() == tokens[row]
        assert alone[1].item() == pytest.approx(log_probs[row].item(), abs=1e-6)


def test_a_race_hardly_notices_rounding_of_the_logits() -> None:
    """Flat distribution over 50,000 tokens: a walk along the cumulative sum would flip in most draws."""
    logits = torch.randn(50_000, generator=torch.Generator().manual_seed(1)) * 0.1
    moved = logits + torch.randn(50_000, generator=torch.Generator().manual_seed(2)) * 1e-5
    same = _draw(logits, SamplingParams(), 200)[0] == _draw(moved, SamplingParams(), 200)[0]
    assert same.float().mean() > 0.99


def test_sampling_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    _draw(_logits(50), SamplingParams(top_p=0.9), 10)
    assert torch.equal(before, torch.get_rng_state())


def test_seeds_samples_and_positions_give_unlike_streams() -> None:
    keys = {stream_key(seed, index) for seed in range(50) for index in range(50)}
    assert len(keys) == 2500
    folded = fold(torch.tensor(sorted(keys)).unsqueeze(-1), torch.arange(40))
    assert folded.unique().numel() == 2500 * 40


def test_noise_is_standard_exponential() -> None:
    values = exponentials(fold(torch.tensor(stream_key(3, 0)), torch.arange(400)), 500).flatten()
    assert values.min() > 0
    assert values.mean().item() == pytest.approx(1.0, abs=4 / math.sqrt(values.numel()))
    assert values.var().item() == pytest.approx(1.0, abs=0.03)
    for quantile in (0.1, 0.5, 0.9, 0.999):
        share = (values <= -math.log(1 - quantile)).double().mean().item()
        assert share == pytest.approx(quantile, abs=4 * math.sqrt(quantile * (1 - quantile) / values.numel()))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n=0"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"logprobs": "all"}, "logprobs"),
    ],
)
def test_impossible_parameters_are_named(wrong: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SamplingParams(**wrong)


MASKED = SamplingParams(temperature=1.3, top_k=5, top_p=0.83, min_p=0.07, logprobs="processed", keep_mask=True)


@pytest.mark.parametrize("vocab", [4, 6, 300])
def test_rows_that_keep_their_mask_draw_what_rows_without_draw_and_name_what_was_kept(vocab: int) -> None:
    logits, count = _logits(vocab), 64
    plain = replace(MASKED, keep_mask=False)
    rows = SamplingRows.build([MASKED, plain] * (count // 2), [7] * count, [0] * count, CPU)
    assert rows.masks is not None
    cut = logits.repeat(count, 1)
    sets = cut_to_masks(cut, rows.masks, rows.mask_width)
    assert torch.equal(cut[1], logits), "the row without a mask is left as it was"
    kept = _exact(logits, MASKED).nonzero().flatten().tolist()
    assert sorted(sets[0][sets[0] >= 0].tolist()) == kept == cut[0].isfinite().nonzero().flatten().tolist()
    assert (sets[1] == -1).all()
    tokens, log_probs = sample(cut, rows, torch.arange(count))
    alone, of_alone = _draw(logits, plain, count)
    assert torch.equal(tokens, alone)
    torch.testing.assert_close(log_probs, of_alone, atol=1e-6, rtol=0)


def test_a_mask_has_no_more_than_top_k_ids_where_logits_tie() -> None:
    params = SamplingParams(top_k=3, logprobs="processed", keep_mask=True)
    rows = SamplingRows.build([params] * 256, [7] * 256, [0] * 256, CPU)
    assert rows.masks is not None
    logits = torch.tensor([1.0, 5.0, 2.0, 2.0, 2.0, 2.0]).repeat(256, 1)
    sets = cut_to_masks(logits, rows.masks, rows.mask_width)
    assert sets.shape == (256, 3)
    tokens, _ = sample(logits, rows, torch.arange(256))
    assert (sets == tokens.unsqueeze(-1)).any(-1).all()
    assert len(tokens.unique()) == 3


@pytest.mark.parametrize(
    ("setting", "rule"), [({"top_k": -1}, "bounds the mask"), ({"logprobs": "raw"}, "'processed'")]
)
def test_a_mask_needs_a_bound_and_log_probs_of_what_it_keeps(setting: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        replace(MASKED, **setting)


def test_engines_that_return_no_masks_refuse_to_be_asked_for_them() -> None:
    with pytest.raises(ValueError, match=r"this vLLM engine returns no sampling masks; use rollout\.name=native"):
        check_logprobs(MASKED, "processed", "this vLLM engine")
