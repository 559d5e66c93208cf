"""bfloat16 on a CPU without units for it: said before the run, with the keys that change it."""

from __future__ import annotations

import re

import pytest

from dovetail.config.load import load_config
from dovetail.trainer import devices

pytestmark = pytest.mark.unit

FLOAT32, GRPO, REWARD = (
    "actor_rollout_ref.rollout.dtype=float32",
    "algorithm.adv_estimator=grpo",
    "trainer.method=reward",
)
PARAM = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
CRITIC = "critic.fsdp_config.mixed_precision.param_dtype"


@pytest.mark.parametrize(
    ("slower", "overrides", "asked"),
    [
        (400.0, [FLOAT32, GRPO], [PARAM]),
        (400.0, [FLOAT32, GRPO, f"{PARAM}=float32"], []),
        # A reward model in training has a dtype of its own.
        (400.0, [REWARD], [CRITIC]),
        (400.0, [REWARD, f"{CRITIC}=float32"], []),
        (0.7, [], []),
    ],
)
def test_a_slow_dtype_is_named_with_what_to_set(
    slower: float,
    overrides: list[str],
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(devices, "_bfloat16_against_float32", lambda: slower)
    devices.warn_of_slow_bfloat16(load_config(overrides=overrides).config)
    assert re.findall(r"([\w.]+)=float32", caplog.text) == asked
    assert ("400 times slower than float32 on this CPU; set " in caplog.text) == bool(asked)


def test_the_ratio_is_a_measurement() -> None:
    assert devices._bfloat16_against_float32() > 0
