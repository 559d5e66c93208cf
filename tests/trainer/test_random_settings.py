"""Settings drawn at random, as nobody would write them in a test: a run ends, resumes exactly, and is computed alike.

Each seed draws settings until the checks accept them. Four steps are trained; a resume from the second repeats the
others bit for bit; settings that only say how something is computed do not change the first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.main import main
from dovetail.config import ConfigError
from dovetail.config.names import ADV_ESTIMATORS, POLICY_LOSSES
from tests.trainer.toy_run import DAPO, Toy, repeatable, train

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
G, C = "algorithm", "algorithm.rollout_correction"
KL = ["kl", "abs", "mse", "low_var_kl", "k3+", "mse+"]

# A chance, and what is then drawn; a list is drawn from, anything else is taken.
SETTINGS: list[tuple[float, dict[str, Any]]] = [
    (1.0, {f"{G}.adv_estimator": [name for name in ADV_ESTIMATORS if name != "gdpo"]}),
    (1.0, {f"{R}.n": [1, 2, 4, 4, 4], f"{R}.temperature": [1.0, 0.7], f"{A}.ppo_mini_batch_size": [1, 2, 4]}),
    (0.6, {f"{A}.policy_loss.loss_mode": list(POLICY_LOSSES)}),
    (
        0.6,
        {f"{A}.loss_agg_mode": ["token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]},
    ),
    (0.4, {f"{A}.use_kl_loss": True, f"{A}.kl_loss_type": [*KL, "k3_unbiased"], f"{A}.kl_loss_coef": 0.1}),
    (0.3, {f"{G}.use_kl_in_reward": True, f"{G}.kl_penalty": KL, f"{G}.kl_ctrl.type": ["fixed", "adaptive"]}),
    (0.4, {f"{A}.ppo_epochs": 2}),
    (0.3, {f"{A}.shuffle": True}),
    (0.3, {f"{A}.entropy_coeff": 0.01}),
    (0.3, {f"{A}.grad_clip": 0.01, f"{A}.optim.lr_scheduler_type": "cosine", f"{A}.optim.lr_warmup_steps": 2}),
    (0.2, {f"{C}.rollout_is": ["token", "sequence"]}),
    (0.2, {f"{C}.rollout_rs": ["token_k1", "seq_mean_k1", "token_k1,seq_mean_k3"], f"{C}.rollout_rs_threshold": 3.0}),
    (0.2, {f"{C}.bypass_mode": True, f"{C}.loss_type": ["ppo_clip", "reinforce"]}),
    (0.2, {f"{A}.policy_loss.off_policy_mask_threshold": [0.0, 0.01, 0.5]}),
    (0.3, DAPO),
    (0.2, {f"{G}.filter_truncated": True}),
    (0.1, {f"{G}.use_pf_ppo": True}),
    (0.3, {f"{M}.lora_rank": 4, f"{M}.lora_alpha": 8}),
    (0.2, {f"{R}.top_k": 20}),
    (0.3, {"trainer.critic_warmup": 1}),
    (0.3, {"reward_model.reward_manager": ["dapo", "prime"]}),
    (0.3, {"custom_reward_function.name": "mostly"}),
    (0.2, {"data.train_batch_size": [2, 6, 8]}),
    (
        0.4,
        {
            "async_training.mode": "fully_async",
            "async_training.max_staleness": [0, 1, 2],
            "async_training.on_stale": ["wait", "drop", "mask"],
            "async_training.order": ["finish", "draw"],
        },
    ),
]
HOW: list[tuple[float, dict[str, Any]]] = [
    (0.5, {f"{A}.use_dynamic_bsz": True, f"{A}.ppo_max_token_len_per_gpu": [48, 100, 400]}),
    (0.5, {f"{A}.ppo_micro_batch_size_per_gpu": [1, 2]}),
    (0.5, {f"{R}.log_prob_micro_batch_size_per_gpu": [1, 2, 8]}),
    (0.5, {f"{M}.use_remove_padding": False}),
    (0.5, {f"{A}.use_prefix_grouper": False}),
    (0.5, {f"{M}.use_fused_kernels": True}),
    (0.3, {f"{M}.enable_gradient_checkpointing": True}),
    (0.5, {"critic.ppo_micro_batch_size_per_gpu": 1}),
    (0.3, {"reward_model.num_workers": 2}),
]


def draw(choices: list[tuple[float, dict[str, Any]]], luck: random.Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    for chance, settings in choices:
        if luck.random() < chance:
            drawn |= {key: luck.choice(value) if isinstance(value, list) else value for key, value in settings.items()}
    return drawn


@pytest.mark.parametrize("seed", range(20))
def test_a_run_ends_resumes_exactly_and_is_computed_alike(toy: Toy, tmp_path: Path, seed: int) -> None:
    luck = random.Random(seed)
    while True:
        settings = draw(SETTINGS, luck) | {"trainer.total_training_steps": 4, "trainer.save_freq": 2}
        try:
            _, rows = train(toy.config(tmp_path / "run", settings))
        except ConfigError:
            continue
        break
    print(settings)
    unreal = [
        (row["step"], key) for row in rows for key, value in row.items() if value is None or not math.isfinite(value)
    ]
    assert not unreal
    checkpoint = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(tmp_path / "run/global_step_2")}
    _, again = train(toy.config(tmp_path / "again", settings | checkpoint))
    _, otherwise = train(toy.config(tmp_path / "otherwise", settings | draw(HOW, luck)))
    is_async = "async_training.mode" in settings
    if is_async:
        assert again[-1]["step"] == 4
        assert main(["audit", str(tmp_path / "run")]) == main(["audit", str(tmp_path / "again")]) == 0
    else:
        assert repeatable(again)[-2:] == repeatable(rows)[-2:]
    if not is_async or settings["async_training.max_staleness"] == 0:
        assert numbers(otherwise[0]) == pytest.approx(numbers(rows[0]), abs=2e-4, rel=2e-4)


def numbers(row: Mapping[str, float]) -> dict[str, float]:
    """What the policy, the rewards and the update were in a step."""
    areas = ("actor/", "critic/", "rollout_corr/", "response_length/")
    return {key: value for key, value in repeatable([dict(row)])[0].items() if key.startswith(areas)}
