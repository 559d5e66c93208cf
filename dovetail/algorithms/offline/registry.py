"""Offline losses as a worker runs them: rows of a micro-batch in, this micro-batch's share of the loss out.

Examples are rows that belong together and stay in one micro-batch: a pair is its chosen row, then its rejected one.
Each loss says which totals of the whole batch it divides by, so that neither micro-batches nor ranks change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from dovetail.algorithms.masked import at_least_float32, masked_sum
from dovetail.algorithms.offline.dpo import dpo_loss
from dovetail.algorithms.offline.ipo import ipo_loss
from dovetail.algorithms.offline.kto import kto_kl, kto_loss
from dovetail.algorithms.offline.orpo import orpo_loss
from dovetail.algorithms.offline.reward import reward_loss
from dovetail.algorithms.offline.simpo import simpo_loss
from dovetail.config.wording import did_you_mean

LOSS_MASK = "loss_mask"
"""Column `[rows, seq_len]`: 1 at the tokens whose log-probs count."""
REF_LOG_PROB = "ref_log_prob_sum"
"""Column `[rows]`: the reference policy's log-probs of those tokens, added up."""
DESIRABLE = "desirable"
"""Column `[rows]`: whether a response is a good one (KTO)."""
MARGIN = "margin"
"""Column `[rows]`: by how much the chosen score should be above the rejected one; read at the chosen row."""

Columns = Mapping[str, Tensor]
Totals = Mapping[str, float]
Result = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class OfflineLoss:
    """A loss with its settings. Knows nothing of models, devices or the sizes of micro-batches."""

    share: Callable[[Tensor, Columns, Totals], Result]
    """`(output, columns, totals)`: what the model returns for these rows (`reads`), their columns, and totals of the
    whole batch; gives the share of the loss and of each metric."""
    count: Callable[[Columns], dict[str, float]]
    """The part of these rows in the totals; added up over ranks."""
    columns: tuple[str, ...]
    """Columns that `share` and `count` read."""
    reads: Literal["log_probs", "scores"] = "log_probs"
    """`[rows, seq_len]` log-probs of tokens, or `[rows]` scores."""
    rows_per_example: int = 1
    baseline: Callable[[Tensor, Columns], dict[str, float]] | None = None
    """Given: only the first row of each example is trained. This adds to the totals what the log-probs of the other
    rows say, which are computed for the whole batch without a gradient before it is trained on."""

    @property
    def needs_reference(self) -> bool:
        return REF_LOG_PROB in self.columns


def preference_loss(loss_type: str, **settings: Any) -> OfflineLoss:
    """The loss that `dpo.loss_type` names. `settings` are the keys of the section `dpo`; each loss takes its own."""
    if loss_type not in _BUILDERS:
        hint = did_you_mean(loss_type, _BUILDERS)
        raise ValueError(f"Unknown preference loss {loss_type!r}.{hint} Known: {', '.join(_BUILDERS)}.")
    return _BUILDERS[loss_type](**settings)


def preference_loss_names() -> list[str]:
    return list(_BUILDERS)


def reward_model_loss(*, center_coefficient: float = 0.0) -> OfflineLoss:
    """Bradley-Terry on scores; pairs may have a column `margin`."""

    def share(scores: Tensor, columns: Columns, totals: Totals) -> Result:
        chosen, rejected = _pairs(at_least_float32(scores))
        margin = _pairs(columns[MARGIN])[0].to(chosen)
        return reward_loss(chosen, rejected, margin, center_coefficient=center_coefficient, num_pairs=totals["pairs"])

    return OfflineLoss(share, _count_pairs, (LOSS_MASK, MARGIN), reads="scores", rows_per_example=2)


def _sigmoid(*, beta: float, label_smoothing: float, **_: Any) -> OfflineLoss:
    def share(log_probs: Tensor, columns: Columns, totals: Totals) -> Result:
        chosen, rejected = _pairs(_sums(log_probs, columns))
        ref_chosen, ref_rejected = _pairs(columns[REF_LOG_PROB])
        return dpo_loss(
            chosen, rejected, ref_chosen, ref_rejected,
            beta=beta, label_smoothing=label_smoothing, num_pairs=totals["pairs"],
        )  # fmt: skip

    return OfflineLoss(share, _count_pairs, (LOSS_MASK, REF_LOG_PROB), rows_per_example=2)


def _ipo(*, beta: float, **_: Any) -> OfflineLoss:
    def share(log_probs: Tensor, columns: Columns, totals: Totals) -> Result:
        chosen, rejected = _pairs(_sums(log_probs, columns))
        ref_chosen, ref_rejected = _pairs(columns[REF_LOG_PROB])
        lengths = _pairs(_lengths(columns))
        return ipo_loss(chosen, rejected, ref_chosen, ref_rejected, *lengths, beta=beta, num_pairs=totals["pairs"])

    return OfflineLoss(share, _count_pairs, (LOSS_MASK, REF_LOG_PROB), rows_per_example=2)


def _simpo(*, beta: float, simpo_gamma: float, label_smoothing: float, **_: Any) -> OfflineLoss:
    def share(log_probs: Tensor, columns: Columns, totals: Totals) -> Result:
        chosen, rejected = _pairs(_means(log_probs, columns))
        return simpo_loss(
            chosen, rejected, beta=beta, gamma=simpo_gamma, label_smoothing=label_smoothing, num_pairs=totals["pairs"]
        )

    return OfflineLoss(share, _count_pairs, (LOSS_MASK,), rows_per_example=2)


def _orpo(*, beta: float, **_: Any) -> OfflineLoss:
    def share(log_probs: Tensor, columns: Columns, totals: Totals) -> Result:
        chosen, rejected = _pairs(_means(log_probs, columns))
        lengths, _ = _pairs(_lengths(columns))
        return orpo_loss(
            chosen, rejected, lengths,
            beta=beta, num_pairs=totals["pairs"], num_chosen_tokens=totals["chosen_tokens"],
        )  # fmt: skip

    def count(columns: Columns) -> dict[str, float]:
        return {**_count_pairs(columns), "chosen_tokens": float(_pairs(_lengths(columns))[0].sum())}

    return OfflineLoss(share, count, (LOSS_MASK,), rows_per_example=2)


def _kto(*, beta: float, desirable_weight: float, undesirable_weight: float, **_: Any) -> OfflineLoss:
    def share(log_probs: Tensor, columns: Columns, totals: Totals) -> Result:
        return kto_loss(
            _sums(log_probs, columns), columns[REF_LOG_PROB], columns[DESIRABLE],
            totals["kl_sum"] / (totals["desirable"] + totals["undesirable"]),
            beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight,
            num_desirable=totals["desirable"], num_undesirable=totals["undesirable"],
        )  # fmt: skip

    def count(columns: Columns) -> dict[str, float]:
        desirable = columns[DESIRABLE][::2].bool()
        return {"desirable": float(desirable.sum()), "undesirable": float((~desirable).sum())}

    def baseline(log_probs: Tensor, columns: Columns) -> dict[str, float]:
        return {"kl_sum": float(kto_kl(_sums(log_probs, columns), columns[REF_LOG_PROB].to(log_probs), num_rows=1))}

    return OfflineLoss(share, count, (LOSS_MASK, REF_LOG_PROB, DESIRABLE), rows_per_example=2, baseline=baseline)


_BUILDERS: dict[str, Callable[..., OfflineLoss]] = {
    "sigmoid": _sigmoid,
    "ipo": _ipo,
    "kto": _kto,
    "orpo": _orpo,
    "simpo": _simpo,
}


def _pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[0::2], rows[1::2]


def _count_pairs(columns: Columns) -> dict[str, float]:
    return {"pairs": len(columns[LOSS_MASK]) / 2}


def _sums(log_probs: Tensor, columns: Columns) -> Tensor:
    return masked_sum(at_least_float32(log_probs), columns[LOSS_MASK], dim=-1)


def _lengths(columns: Columns) -> Tensor:
    return columns[LOSS_MASK].bool().sum(dim=-1)


def _means(log_probs: Tensor, columns: Columns) -> Tensor:
    return _sums(log_probs, columns) / _lengths(columns).clamp(min=1)
