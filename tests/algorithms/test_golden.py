"""Every golden case: values, gradients and metrics of the reference system, to 1e-5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.algorithms import (
    AdaptiveKLController,
    agg_loss,
    compute_rollout_correction_weights,
    compute_value_loss,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    kl_penalty,
)

pytestmark = pytest.mark.unit

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "algorithms.json").read_text())[
    "cases"
]


def test_there_are_61_golden_cases() -> None:
    assert len(CASES) == 61


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_case_matches_to_1e_5(case: dict[str, Any]) -> None:
    inputs = {
        name: np.array(value, dtype=object) if name == "uid" else torch.tensor(value, dtype=torch.float32)
        for name, value in case["inputs"].items()
    }
    actual = _CALLS[case["kind"]](inputs, dict(case["params"]))
    assert set(actual) == set(case["outputs"])
    for name, expected in case["outputs"].items():
        torch.testing.assert_close(
            torch.as_tensor(actual[name], dtype=torch.float64).detach(),
            torch.tensor(expected, dtype=torch.float64),
            atol=1e-5,
            rtol=0,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def _advantage(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    advantages, returns = get_adv_estimator_fn(params.pop("adv_estimator"))(**inputs, **params)
    return {"advantages": advantages, "returns": returns}


def _policy_loss(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    inputs["log_prob"].requires_grad_()
    loss, metrics = get_policy_loss_fn(params.pop("loss_mode"))(**inputs, **params)
    loss.backward()
    return {"loss": loss, "grad_log_prob": inputs["log_prob"].grad, **metrics}


def _kl_penalty(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    logprob = inputs["logprob"].requires_grad_()
    penalty = kl_penalty(logprob, inputs["ref_logprob"], params["kl_penalty"])
    assert params["grad_of"] == "sum(penalty * arange(1, T+1))"
    (penalty * torch.arange(1, penalty.shape[1] + 1)).sum().backward()
    return {"penalty": penalty, "grad_logprob": logprob.grad}


def _agg_loss(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    return {"loss": agg_loss(inputs["loss_mat"], inputs["loss_mask"], params["loss_agg_mode"])}


def _value_loss(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    vpreds = inputs.pop("vpreds").requires_grad_()
    loss, clipfrac = compute_value_loss(
        vpreds,
        inputs["returns"],
        inputs["values"],
        inputs["response_mask"],
        params["cliprange_value"],
        params["loss_agg_mode"],
    )
    loss.backward()
    return {"loss": loss, "clipfrac": clipfrac, "grad_vpreds": vpreds.grad}


def _kl_controller(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    updates = params.pop("updates")
    controller = AdaptiveKLController(**params)
    values = []
    for current_kl, n_steps in updates:
        controller.update(current_kl, n_steps)
        values.append(controller.value)
    return {"values": values}


def _rollout_correction(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    return {"weights": compute_rollout_correction_weights(**inputs, **params)}


_CALLS = {
    "advantage": _advantage,
    "policy_loss": _policy_loss,
    "kl_penalty": _kl_penalty,
    "agg_loss": _agg_loss,
    "value_loss": _value_loss,
    "kl_controller": _kl_controller,
    "rollout_correction": _rollout_correction,
}
