"""Whole runs of a mixture with `router_replay`, and what is refused by name before one starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.config import load_config
from dovetail.config.effects import is_unused, unsupported_in_runs
from tests.docs.commands import page_command
from tests.models.tiny import save_tiny_model
from tests.trainer.toy_run import Toy, save_toy_data, train

R, A = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
MODE, RETURNS = f"{A}.router_replay.mode", f"{R}.enable_rollout_routing_replay"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("mixture")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_experts": 8}
    return Toy(save_tiny_model("qwen3_moe", folder / "model", **shape), save_toy_data(folder / "data"))


@pytest.mark.e2e
def test_a_run_with_r2_replays_in_every_mini_batch(mixture: Toy, tmp_path: Path) -> None:
    asked = page_command("rollout.md", "router_replay.mode=R2").keys
    changes = {**asked, f"{A}.use_kl_loss": True, f"{A}.optim.lr": 1e-2}
    changes["actor_rollout_ref.model.enable_gradient_checkpointing"] = True
    _, steps = train(mixture.config(tmp_path / "run", changes))
    assert len(steps) == 3
    # The first mini-batch's weights are those of the recorded pass; the second one's routers have moved.
    assert all(0 < step["actor/routing_changed_share"] < 0.5 for step in steps)
    assert all(step["rollout_corr/k3_kl"] < 1e-8 for step in steps)


ASYNC: dict[str, Any] = {
    "async_training.mode": "fully_async", f"{A}.ppo_mini_batch_size": 4, "async_training.record": True,
}  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize("changes", [{f"{R}.dtype": "bfloat16"}, ASYNC], ids=["bfloat16", "async"])
def test_a_run_with_r3_replays_the_engines_experts(mixture: Toy, tmp_path: Path, changes: dict[str, Any]) -> None:
    _, steps = train(mixture.config(tmp_path / "run", {MODE: "R3", f"{A}.optim.lr": 1e-2, **changes}))
    shares = [step["actor/routing_changed_share"] for step in steps]
    assert all(0 < share < 0.5 for share in shares[1:])
    # The first responses of the stream are of the weights that learn from them, in the same dtype.
    assert (shares[0] == 0) == (changes is ASYNC)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("mode", "key", "value", "why"),
    [
        ("R2", f"{A}.strategy", "megatron", "use fsdp2"),
        ("R2", f"{R}.exact", True, "choose alike"),
        ("R2", "algorithm.rollout_correction.bypass_mode", True, "use R3"),
        ("R3", RETURNS, False, f"leave {RETURNS} out"),
    ],
)
def test_what_cannot_replay_is_refused_by_name(mode: str, key: str, value: Any, why: str) -> None:
    config = load_config(overrides=[f"{MODE}={mode}", f"{key}={value}"]).config
    refused = [str(problem) for problem in unsupported_in_runs(config) if problem.key == MODE]
    assert len(refused) == 1
    assert why in refused[0]


@pytest.mark.unit
def test_r2_without_an_earlier_pass_has_no_effect_and_says_so() -> None:
    one_step = ["data.train_batch_size=64", f"{A}.ppo_mini_batch_size=64", f"{MODE}=R2"]
    assert is_unused(load_config(overrides=one_step).config, MODE)
    assert not is_unused(load_config(overrides=[*one_step, f"{A}.ppo_mini_batch_size=32"]).config, MODE)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("key", "value", "why"),
    [(f"{R}.name", "vllm", "mode=R2"), (f"{R}.name", "sglang", "mode=R2"), (f"{R}.multi_turn.enable", True, "turns")],
)
def test_engines_that_return_no_experts_are_refused_for_r3(key: str, value: Any, why: str) -> None:
    """As verl's launch lists say it, and with the mode alone, which asks the engine for them."""
    for asked in ([f"{MODE}=R3"], [f"{MODE}=R3", f"{RETURNS}=True"]):
        config = load_config(overrides=[*asked, f"{key}={value}"]).config
        refused = [str(problem) for problem in unsupported_in_runs(config) if problem.key == RETURNS]
        assert len(refused) == 1
        assert why in refused[0]
    assert unsupported_in_runs(load_config(overrides=[f"{MODE}=R3"]).config) == []


@pytest.mark.unit
@pytest.mark.parametrize("mode", ["disabled", "R2"])
def test_experts_that_only_r3_replays_are_refused_without_it(mode: str) -> None:
    """With R2 they would be in the place of those of the pass, and a model without experts has none."""
    problems = unsupported_in_runs(load_config(overrides=[f"{MODE}={mode}", f"{RETURNS}=True"]).config)
    assert [problem.key for problem in problems] == [RETURNS]
    assert "set that mode, or leave this key out" in str(problems[0])
