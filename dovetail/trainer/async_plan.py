"""The plan of an asynchronous run: which devices train and which generate, how far ahead, and what a step will take."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from dovetail.config.root import DovetailConfig
from dovetail.trainer.simulate import Prediction, Schedule, predict

if TYPE_CHECKING:  # reads run folders, for which it imports numpy
    from dovetail.trainer.run_speeds import RunRecords


class RecordsError(ValueError):
    """Nothing can be predicted from an earlier run; the message says why."""


@dataclass(frozen=True)
class AsyncPlan:
    """`prediction` and `taking_turns` (the same devices, synchronous) need an earlier run."""

    mode: str
    train_devices: int
    generation_devices: int
    num_engines: int
    groups_per_step: int
    groups_ahead: int
    """At most so many are trained on, finished or running at a time; of dynamic sampling, so many with a signal, as far
    as that can be expected."""
    max_staleness: int
    shares_devices: bool
    is_filtered: bool = False
    """Dynamic sampling, which predictions do not know."""
    prediction: Prediction | None = None
    taking_turns: Prediction | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_async_plan(config: DovetailConfig, records: RunRecords | None = None) -> AsyncPlan | None:
    """None for a synchronous run."""
    if config.async_training.mode == "off":
        return None
    schedule = Schedule.of(config)
    devices = config.trainer.world_size
    plan = AsyncPlan(
        mode=config.async_training.mode,
        train_devices=devices,
        generation_devices=devices if schedule.shares_devices else config.actor_rollout_ref.rollout.own_devices,
        num_engines=schedule.num_engines,
        groups_per_step=schedule.groups_per_step,
        groups_ahead=schedule.groups_per_step * (1 + schedule.max_staleness),
        max_staleness=schedule.max_staleness,
        shares_devices=schedule.shares_devices,
        is_filtered=config.algorithm.filter_groups.enable,
    )
    if records is None:
        return plan
    scale = records.train_devices / devices
    measured = records.speeds
    speeds = replace(measured, train_step_s=measured.train_step_s * scale, train_token_s=measured.train_token_s * scale)
    turns = replace(schedule, max_staleness=0, order="draw", on_stale="wait", finishes_before_update=True)
    return replace(
        plan,
        prediction=predict(schedule, speeds, records.groups, prompt_length=records.prompt_length),
        taking_turns=predict(turns, speeds, records.groups, prompt_length=records.prompt_length),
    )
