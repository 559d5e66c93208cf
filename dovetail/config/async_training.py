"""`async_training.*`: training while generation goes on (one step off, or fully asynchronous)."""

from __future__ import annotations

import math
from typing import Literal

from dovetail.config.base import Section, key, unused, when_is, when_not

Mode = Literal["off", "one_step_off", "fully_async"]


class AsyncTrainingConfig(Section):
    """How far generation may run ahead of training, and what the update does with responses of older weights."""

    rules = (
        unused("generation and training take turns ({section}.mode=off)", when_is("mode", "off"), but="mode"),
        unused(
            "one_step_off is always one step behind, in the order of the draws, and finishes what runs",
            when_is("mode", "one_step_off"),
            only="staleness_threshold on_stale order partial_rollout max_in_flight",
        ),
        unused("draws are trained in their order, so none gets too old", when_is("order", "draw"), only="on_stale"),
        unused("{section}.max_staleness is set", when_not("max_staleness", None), only="staleness_threshold"),
        unused(
            "engines on devices of their own never stop (actor_rollout_ref.hybrid_engine=False)",
            when_is("actor_rollout_ref.hybrid_engine", False),
            only="max_in_flight",
        ),
    )

    mode: Mode = key(
        "off",
        "off: generate, then train. one_step_off: generate the next batch while this one trains. fully_async: engines "
        "never stop; with hybrid_engine=True unfinished responses are continued under the next weights.",
        reads={False: "off"},  # YAML reads a bare `off` as false
    )
    max_staleness: int | None = key(
        None,
        "Most updates between the weights of a response's oldest token and the step that trains on it. Null: 1 with "
        "one_step_off, else ceil((1 + staleness_threshold) x trigger_parameter_sync_step) - 1.",
        ge=0,
    )
    staleness_threshold: float = key(
        0.1, "Share of a cycle's prompts that may be generated ahead of it; read where max_staleness is null.", ge=0
    )
    trigger_parameter_sync_step: int = key(1, "Steps between two transfers of weights to engines of their own.", ge=1)
    partial_rollout: bool = key(
        True, "Continue running responses under new weights. False: new weights wait until all of them are finished."
    )
    on_stale: Literal["wait", "drop", "mask"] = key(
        "wait",
        "A group at the bound: the step waits for it. Beyond it: the group is dropped, or its older tokens are masked.",
    )
    max_in_flight: int | None = key(
        None,
        "With hybrid_engine=True: groups that may have begun when a step has its own; new weights make their cache be "
        "computed again. Null: those of a step, and an eighth more.",
        ge=1,
    )
    order: Literal["finish", "draw"] = key(
        "finish", "Groups are trained as they finish, oldest weights first, or in the order of the prompts."
    )
    prox: Literal["recompute", "loglinear"] | None = key(
        None,
        "Old log-probs of stale responses: recomputed by the weights before the update (advised from a bound of 4, "
        "with `algorithm.rollout_correction.rollout_is=token`), interpolated between engine and update by version, or "
        "(null) the engine's. Sets `algorithm.rollout_correction.bypass_mode`.",
    )
    record: bool = key(False, "Keep every batch in the run folder, so that `dovetail replay` can repeat it.")
    stall_timeout_s: float = key(300.0, "Without progress for so long, say who waits and stop; 0: never.", ge=0)

    @property
    def staleness_bound(self) -> int:
        """`max_staleness` in force; 0 when generation and training take turns."""
        if self.mode == "off":
            return 0
        if self.max_staleness is not None:
            return self.max_staleness
        if self.mode == "one_step_off":
            return 1
        # Rounded, because 1.1 x 10 is a little more than 11 in binary.
        return math.ceil(round((1 + self.staleness_threshold) * self.trigger_parameter_sync_step, 6)) - 1

    @property
    def on_stale_in_force(self) -> Literal["wait", "drop", "mask"]:
        """In the order of the draws none gets too old, so the step waits for those it needs."""
        return self.on_stale if self.order_in_force == "finish" else "wait"

    @property
    def finishes_before_update(self) -> bool:
        """Whether new weights wait until every running response is finished."""
        return self.mode == "one_step_off" or not self.partial_rollout

    @property
    def order_in_force(self) -> Literal["finish", "draw"]:
        """The order in which groups are trained."""
        return "finish" if self.mode == "fully_async" and self.order == "finish" else "draw"
