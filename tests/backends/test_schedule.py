"""Learning rates against their closed forms."""

from __future__ import annotations

import json
import math

import pytest
import torch

from dovetail.backends.schedule import LearningRateSchedule, TrainingProgress, learning_rate
from dovetail.config.optim import OptimConfig

pytestmark = pytest.mark.unit


def rates(num_steps: int, **settings: object) -> list[float]:
    config = OptimConfig.model_validate({"lr": 2.0, **settings})
    return [learning_rate(step, config, num_steps) for step in range(num_steps + 2)]


def test_constant_after_a_linear_warmup() -> None:
    assert rates(6, lr_warmup_steps=4) == pytest.approx([0, 0.5, 1, 1.5, 2, 2, 2, 2])


def test_warmup_starts_at_its_initial_rate() -> None:
    assert rates(3, lr_warmup_steps=2, lr_warmup_init=1.0) == pytest.approx([1, 1.5, 2, 2, 2])


def test_warmup_by_ratio_counts_steps_of_the_run() -> None:
    assert rates(10, lr_warmup_steps_ratio=0.2)[:4] == pytest.approx([0, 1, 2, 2])


def test_an_explicit_warmup_of_zero_wins_over_the_ratio() -> None:
    assert rates(10, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5)[0] == 2


def test_cosine_falls_to_the_minimum_and_stays_there() -> None:
    found = rates(12, lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.1)
    expected = [0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * min(1.0, (s - 2) / 10))) for s in range(2, 14)]
    assert found == pytest.approx([0, 1, *expected])
    assert found[-1] == pytest.approx(0.2)


def test_two_cosine_cycles_come_back_to_the_peak() -> None:
    found = rates(8, lr_scheduler_type="cosine", num_cycles=2.0)
    assert found[:9] == pytest.approx([2, 1, 0, 1, 2, 1, 0, 1, 2], abs=1e-12)


def test_linear_falls_to_the_minimum_and_stays_there() -> None:
    found = rates(4, lr_scheduler_type="linear", min_lr=1.0)
    assert found == pytest.approx([2, 1.75, 1.5, 1.25, 1, 1])


def test_inverse_square_root_halves_at_four_times_the_warmup() -> None:
    found = rates(16, lr_scheduler_type="inverse_square_root", lr_warmup_steps=4)
    assert (found[4], found[9], found[16]) == pytest.approx((2, 2 * 2 / 3, 1))


def test_wsd_is_flat_then_decays_to_the_minimum() -> None:
    found = rates(8, lr_scheduler_type="wsd", lr_wsd_decay_steps=4, lr_wsd_decay_style="linear")
    assert found == pytest.approx([2, 2, 2, 2, 2, 1.5, 1, 0.5, 0, 0])
    found = rates(8, lr_scheduler_type="wsd", lr_wsd_decay_steps=4)
    assert found[6] == pytest.approx(2 * (2 * 0.5**0.5 - 1))
    assert found[8] == pytest.approx(0)


def test_a_decaying_schedule_without_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match="total_training_steps"):
        learning_rate(0, OptimConfig(lr_scheduler_type="cosine"), -1)


def test_a_loaded_schedule_continues_the_curve() -> None:
    def build() -> tuple[torch.optim.Optimizer, LearningRateSchedule]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        config = OptimConfig(lr=2.0, lr_scheduler_type="linear")
        return optimizer, LearningRateSchedule(optimizer, lambda step: learning_rate(step, config, 4))

    _, first = build()
    first.step()
    first.step()
    optimizer, second = build()
    second.load_state_dict(first.state_dict())
    assert second.lr == 1.0
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_the_schedule_counts_training_steps_that_changed_the_weights_also_through_a_resume() -> None:
    """As accelerate, transformers' Trainer and Megatron-LM, which do not advance it where the optimizer was skipped."""

    def build() -> TrainingProgress:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        return TrainingProgress(LearningRateSchedule(optimizer, float))

    good, bad = 1.0, math.nan
    mini_batches = [(good, good), (good, bad), (bad, good), (bad, bad), (good, good)]
    progress, before = build(), []
    for first, second in mini_batches:
        before.append(progress.stepped(first, advance_schedule=False).lr)
        result = progress.stepped(second, advance_schedule=True)
        resumed = build()
        resumed.unpack(json.loads(json.dumps(progress.pack(None))))
        progress = resumed
    assert before == [0.0, 1.0, 2.0, 3.0, 3.0]
    assert result.num_skipped == 4
