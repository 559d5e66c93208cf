"""bfloat16 on a CPU without units for it: said before the run, with the keys that change it."""

from __future__ import annotations

import pytest

from dovetail.config.load import load_config
from dovetail.trainer import devices

pytestmark = pytest.mark.unit

FLOAT32 = ("actor_rollout_ref.rollout.dtype=float32",)
PARAM = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"


def test_a_slow_dtype_is_named_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "_bfloat16_against_float32", lambda: 400.0)
    devices.warn_of_slow_bfloat16(load_config(overrides=list(FLOAT32)).config)
    assert f"400 times slower than float32 on this CPU; set {PARAM}=float32" in caplog.text
    assert "rollout.dtype" not in caplog.text


def test_a_reward_model_in_training_has_its_own_dtype(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "_bfloat16_against_float32", lambda: 400.0)
    critic = "critic.fsdp_config.mixed_precision.param_dtype"
    devices.warn_of_slow_bfloat16(load_config(overrides=["trainer.method=reward"]).config)
    assert f"set {critic}=float32" in caplog.text
    assert PARAM not in caplog.text
    caplog.clear()
    devices.warn_of_slow_bfloat16(load_config(overrides=["trainer.method=reward", f"{critic}=float32"]).config)
    assert caplog.text == ""


def test_nothing_is_said_where_it_is_fast_or_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "_bfloat16_against_float32", lambda: 0.7)
    devices.warn_of_slow_bfloat16(load_config().config)
    monkeypatch.setattr(devices, "_bfloat16_against_float32", lambda: 400.0)
    grpo = "algorithm.adv_estimator=grpo"
    devices.warn_of_slow_bfloat16(load_config(overrides=[*FLOAT32, f"{PARAM}=float32", grpo]).config)
    assert caplog.text == ""


def test_the_ratio_is_a_measurement() -> None:
    assert devices._bfloat16_against_float32() > 0
