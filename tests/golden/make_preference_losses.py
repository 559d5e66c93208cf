"""Write preference_losses.json: what TRL's own trainers compute on small random tensors. Needs `pip install trl`.

Run as a script. No model is built: a stand-in returns the log-probs, and TRL's arithmetic does the rest.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

PAIRS, WIDTH = 4, 6
ACCELERATOR = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)


def main() -> None:
    torch.manual_seed(0)
    cases = [
        *(_pairs("sigmoid", beta=beta, label_smoothing=0.0) for beta in (0.1, 0.7)),
        _smoothed(beta=0.3, label_smoothing=0.2),
        *(_pairs("ipo", beta=beta) for beta in (0.1, 1.0)),
        _kto(beta=0.2, desirable_weight=1.0, undesirable_weight=1.0, drift=1.0),
        _kto(beta=0.5, desirable_weight=1.3, undesirable_weight=0.7, drift=-1.0),
        _orpo(beta=0.1),
        _orpo(beta=0.8),
        _simpo(beta=2.0, simpo_gamma=0.5, label_smoothing=0.0),
        _simpo(beta=1.0, simpo_gamma=1.4, label_smoothing=0.1),
        *(_reward(center_coefficient=center) for center in (0.0, 0.05)),
    ]
    content = {"reference": f"trl {trl.__version__} (PyPI), float32", "cases": cases}
    Path(__file__).with_name("preference_losses.json").write_text(json.dumps(content) + "\n")


def _rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and a mask of rows; the first token is never predicted."""
    mask = torch.zeros(count, WIDTH)
    for row in range(count):
        mask[row, 1 : 2 + row % (WIDTH - 2) + 1] = 1
    return -torch.rand(count, WIDTH) * 2, mask


def _case(loss_type: str, loss: torch.Tensor, metrics: Any, leaf: torch.Tensor, settings: Any, **inputs: Any) -> Any:
    loss.backward()
    return {
        "loss_type": loss_type,
        "settings": settings,
        "inputs": {name: value.detach().tolist() for name, value in inputs.items()},
        "loss": loss.item(),
        "metrics": {name: float(torch.as_tensor(value).detach()) for name, value in metrics.items()},
        "grad": leaf.grad.tolist(),
    }


def _trainer(**settings: Any) -> Any:
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=ACCELERATOR,
        args=SimpleNamespace(center_rewards_coefficient=None, gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


def _model(tables: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Called with token ids, gives the log-probs of the table that the first id names."""

    def call(input_ids: torch.Tensor, **_: Any) -> Any:
        log_probs, mask = tables[int(input_ids[0, 0])]
        tokens = (log_probs * mask)[:, 1:]
        other = torch.zeros_like(tokens)
        return SimpleNamespace(log_probs=tokens, entropy=other, mean_logits=other, is_top1=other.bool())

    return call


def _ids(rows: int, table: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.full((rows, WIDTH), table), "attention_mask": torch.ones(rows, WIDTH)}


def _logged(trainer: Any) -> dict[str, float]:
    wanted = ("rewards/", "logps/", "kl", "accuracy", "margin", "mean_reward")
    return {name: values[0] for name, values in trainer._metrics["train"].items() if name.startswith(wanted)}


def _pairs(loss_type: str, **settings: float) -> Any:
    log_probs, mask = _rows(2 * PAIRS)
    ref = (log_probs * mask).sum(1) + torch.randn(2 * PAIRS)
    log_probs.requires_grad_()
    order = [*range(0, 2 * PAIRS, 2), *range(1, 2 * PAIRS, 2)]  # TRL has all chosen rows first
    trainer = _trainer(loss_types=[loss_type], loss_weights=[1.0], beta=settings["beta"])
    inputs = {
        **_ids(2 * PAIRS, 0),
        "completion_mask": mask[order],
        "ref_chosen_logps": ref[0::2],
        "ref_rejected_logps": ref[1::2],
    }
    loss = DPOTrainer._compute_loss(trainer, _model({0: (log_probs[order], mask[order])}), inputs, False)
    inputs = {"log_probs": log_probs, "loss_mask": mask, "ref_log_prob_sum": ref}
    return _case(loss_type, loss, _logged(trainer), log_probs, settings, **inputs)


def _smoothed(**settings: float) -> Any:
    """DPO's trainer has no label smoothing any more; CPO's has, with the log-ratios where it has log-probs."""
    log_probs, mask = _rows(2 * PAIRS)
    ref = (log_probs * mask).sum(1) + torch.randn(2 * PAIRS)
    log_probs.requires_grad_()
    trainer = _trainer(loss_type="sigmoid", alpha=0.0, **settings)
    ratios = (log_probs * mask).sum(1) - ref
    losses, chosen, rejected = CPOTrainer.cpo_loss(trainer, ratios[0::2], ratios[1::2])
    metrics = {"rewards/chosen": chosen.mean(), "rewards/rejected": rejected.mean()}
    inputs = {"log_probs": log_probs, "loss_mask": mask, "ref_log_prob_sum": ref}
    return _case("sigmoid", losses.mean(), metrics, log_probs, settings, **inputs)


def _kto(drift: float, **settings: float) -> Any:
    log_probs, mask = _rows(2 * PAIRS)
    other, other_mask = _rows(2 * PAIRS)
    ref = (log_probs * mask).sum(1) + torch.randn(2 * PAIRS)
    ref_other = (other * other_mask).sum(1) + torch.randn(2 * PAIRS) - drift
    log_probs.requires_grad_()
    desirable = torch.tensor([True, False, True, True, False, False, True, True])
    trainer = _trainer(loss_type="kto", calculate_KL=True, **settings)
    trainer._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(trainer, model, batch)
    inputs = {
        **_ids(2 * PAIRS, 0),
        **{f"KL_{name}": value for name, value in _ids(2 * PAIRS, 1).items()},
        "completion_mask": mask,
        "KL_completion_mask": other_mask,
        "label": desirable,
        "ref_logps": ref,
        "ref_KL_logps": ref_other,
    }
    model = _model({0: (log_probs, mask), 1: (other, other_mask)})
    loss = KTOTrainer._compute_loss(trainer, model, inputs, False)
    inputs = {"log_probs": log_probs, "loss_mask": mask, "ref_log_prob_sum": ref, "desirable": desirable}
    baseline = {"kl_log_probs": other, "kl_loss_mask": other_mask, "kl_ref_log_prob_sum": ref_other}
    return _case("kto", loss, _logged(trainer), log_probs, settings, **inputs, **baseline)


def _orpo(**settings: float) -> Any:
    log_probs, mask = _rows(2 * PAIRS)
    log_probs.requires_grad_()
    means = (log_probs * mask).sum(1) / mask.sum(1)
    trainer = _trainer(**settings)
    gains, chosen, rejected, ratio, odds = ORPOTrainer.odds_ratio_loss(trainer, means[0::2], means[1::2])
    nll = -(log_probs * mask)[0::2].sum() / mask[0::2].sum()
    metrics = {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "nll_loss": nll,
        "log_odds_ratio": ratio,
        "log_odds_chosen": odds,
    }
    inputs = {"log_probs": log_probs, "loss_mask": mask}
    return _case("orpo", nll - gains.mean(), metrics, log_probs, settings, **inputs)


def _simpo(**settings: float) -> Any:
    log_probs, mask = _rows(2 * PAIRS)
    log_probs.requires_grad_()
    means = (log_probs * mask).sum(1) / mask.sum(1)
    trainer = _trainer(loss_type="simpo", alpha=0.0, **settings)
    losses, chosen, rejected = CPOTrainer.cpo_loss(trainer, means[0::2], means[1::2])
    metrics = {"rewards/chosen": chosen.mean(), "rewards/rejected": rejected.mean()}
    return _case("simpo", losses.mean(), metrics, log_probs, settings, log_probs=log_probs, loss_mask=mask)


def _reward(center_coefficient: float) -> Any:
    scores, margin = torch.randn(2 * PAIRS, requires_grad=True), torch.rand(PAIRS)
    trainer = _trainer()
    trainer.args.center_rewards_coefficient = center_coefficient or None
    order = [*range(0, 2 * PAIRS, 2), *range(1, 2 * PAIRS, 2)]
    inputs = {**_ids(2 * PAIRS, 0), "margin": margin}
    model = lambda **_: SimpleNamespace(logits=scores[order].unsqueeze(1))  # noqa: E731
    loss = RewardTrainer.compute_loss(trainer, model, inputs)
    settings = {"center_coefficient": center_coefficient}
    inputs = {"scores": scores, "margin": margin.repeat_interleave(2), "loss_mask": torch.ones(2 * PAIRS, 1)}
    return _case("reward", loss, _logged(trainer), scores, settings, **inputs)


if __name__ == "__main__":
    main()
