"""`RolloutStream`: the driver's side of generation that does not wait for training, nor training for its slowest part.

Draws start as `Pace` allows, run on engines of their own (`SeparateEngines`) or between updates on the trainer's
devices, and leave as whole groups. Every draw ends once, trained or dropped; the ledger says so. What is unfinished is
part of a checkpoint, with its tokens; finished groups are scored at once (`GroupScores`). Knows no loss and no model.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dovetail.config.root import DovetailConfig
from dovetail.observability.ledger import DrawLedger
from dovetail.observability.stalls import Waits
from dovetail.protocol import DataProto
from dovetail.trainer.generators import Draw, Generator, OnOwnDevices, OnTrainerDevices, draw_number, draw_uid, joined
from dovetail.trainer.group_rows import (
    mask_older,
    num_restarted,
    number_of,
    split_groups,
    version_range,
    version_runs,
)
from dovetail.trainer.group_scores import GroupScores
from dovetail.trainer.groups import RoleGroups
from dovetail.trainer.pace import Pace, choose
from dovetail.trainer.requests import engine_request, join_answers

logger = logging.getLogger(__name__)

_SCORE_POLL_S = 0.05
"""How long a step that waits for scores waits for the next one before it looks for finished groups again."""
_MEMORY = 0.9
"""What a step before counts for in the share of groups with signal, against this one: it changes as a model learns."""

READY, PROMPTS, PARTIAL, SCORES = "stream_ready", "stream_prompts", "stream_partial", "stream_scores"
"""Files of a checkpoint: groups that wait for a step, prompts of unfinished ones, their responses so far, and the
scores of those that wait."""


class RolloutStream:
    """`next` gives the groups of a batch; `update` tells the engines of new weights and lets more draws start."""

    def __init__(
        self,
        config: DovetailConfig,
        groups: RoleGroups,
        ledger: DrawLedger,
        *,
        draw_prompts: Callable[[], DataProto],
        total_steps: int,
        scores: GroupScores | None = None,
        on_wait: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._settings = config.async_training
        self._rollout = config.actor_rollout_ref.rollout
        self._count, self._num_trained = config.generation_batch_size, config.data.train_batch_size
        self._is_filtered = config.algorithm.filter_groups.enable
        self._draw_prompts = draw_prompts
        self._total_steps = total_steps
        self._bound = config.group_staleness_bound
        self._max_in_flight = config.groups_in_flight
        self._generator: Generator = (
            OnTrainerDevices(groups.actor_rollout, self._max_in_flight)
            if groups.engines is None
            else OnOwnDevices(groups.engines, self._settings.stall_timeout_s)
        )
        # Engines of their own generate meanwhile, and the order is a matter of time anyway. Elsewhere the same groups
        # would be taken a little later.
        self._waits_for_scores = groups.engines is not None and self._settings.order_in_force == "finish"
        self.ledger = ledger
        self.scores = scores or GroupScores(None)
        self.pace = Pace(self._settings.staleness_bound)
        self.waits = Waits()
        self._on_wait = on_wait
        self._version = self._last_step = 0
        self._ready: dict[int, Draw] = {}
        self._running: dict[int, Draw] = {}
        self._taken: dict[int, Draw] = {}  # given to the trainer, and not yet trained on or dropped
        self._given_now: list[int] = []  # of those, what the step in progress was given
        self._num_given = self._num_usable = 0.0  # of late; dynamic sampling leaves out groups without signal
        self._given_at = 0.0
        self._chunks_now = 0
        self._dropped_now: list[tuple[int, str]] = []

    # ---- the step ----

    def begin_step(self) -> None:
        self._given_now, self._chunks_now, self._dropped_now = [], 0, []

    def next(self, step: int) -> DataProto:
        """Whole groups for step `step`, as many as a generation batch has, in the order of their draws."""
        self._drop(self._beyond_bound(step))
        self._start_allowed()
        wait_began = time.monotonic()
        while True:
            unscored = self._unscored()
            choice = choose(
                [draw for number, draw in self._ready.items() if number not in unscored],
                [*unscored.values(), *self._running.values()],
                count=self._count,
                step=step,
                max_staleness=self._bound,
                order=self._settings.order_in_force,
                on_stale=self._settings.on_stale_in_force,
                is_filtered=self._is_filtered,
            )
            self._drop(choice.too_old)
            if choice.chosen is not None:
                break
            if len(self._ready) + len(self._running) < self._count:
                self._begin(self._draw_chunk(), None)
            self._advance(choice.must_finish, wait_began)
        self.waits.clear()
        return self._give(choice.chosen, step)

    def collect(self) -> None:
        """Take what engines of their own have finished and start to score it. For while the trainer is busy."""
        self._receive_all(self._generator.collect())

    def watch_scores(self) -> None:
        """The trainer waits for the scores of the groups it was given: name them when that takes too long."""
        self.collect()
        self.waits.clear()
        self.scores.watch(self.waits, self._given_now, self._given_at, self._settings.stall_timeout_s)
        self._check_waits()

    def update(self, version: int, step: int) -> dict[str, float]:
        """The trainer has new weights: bring them to the engines when it is time, and start what may start then."""
        metrics = self.bring_weights(version) if self.is_due(step) else {}
        self._start_allowed()
        self.ledger.flush(step)
        return metrics | {
            "async/groups_ready": float(len(self._ready)),
            "async/groups_running": float(len(self._running)),
        }

    def is_due(self, step: int) -> bool:
        """Whether the weights of this step go to the engines."""
        return step % self._settings.trigger_parameter_sync_step == 0

    def finish_running(self) -> None:
        """Wait until nothing is generated."""
        began = time.monotonic()
        while self._running:
            self._advance(sorted(self._running), began)

    def bring_weights(self, version: int) -> dict[str, float]:
        """The engines get the trainer's weights, of this version, where they have others. A validation needs them."""
        if version == self._version:
            return {}
        if self._settings.finishes_before_update:
            self.finish_running()
        metrics = self._generator.take_weights(version)
        self._version = version
        self.pace.num_taken_at_update = self.pace.num_taken
        return metrics

    def activity(self) -> list[list[tuple[str, float, float]]]:
        """What engines on devices of their own did since the last call, for the timeline."""
        return self._generator.activity()

    def trained(self, step: int, uids: Sequence[str], *, kept: Sequence[str] = ()) -> None:
        """The step trained on these draws. Those of `kept` belong to a later step; the others taken are dropped."""
        used = {draw_number(uid) for uid in uids}
        masks_stale = self._settings.on_stale_in_force == "mask"
        self.ledger.trained(sorted(used), step, bound=self._bound, masks_stale=masks_stale)
        later = {draw_number(uid) for uid in kept}
        self._last_step = step
        self._num_given = _MEMORY * self._num_given + len(self._given_now)
        self._num_usable = _MEMORY * self._num_usable + len((used | later) & set(self._given_now))
        for number in sorted(self._taken.keys() - used - later):
            draw = self._taken[number]
            too_old = (draw.newest if masks_stale else draw.version) < step - 1 - self._bound
            self._dropped_now.append((number, "too old" if too_old else "no signal"))
        for number, reason in self._dropped_now:
            self.ledger.dropped(number, reason, step)
        self.scores.forget(self._taken)
        self._taken = {number: draw for number, draw in self._taken.items() if number in later}
        self.begin_step()

    def undo_step(self, step: int) -> None:
        """The step in progress is given up, `step` was the last: what it was given waits again; drops stay."""
        for number, reason in self._dropped_now:
            self.ledger.dropped(number, reason, step)
        for number in self._given_now:
            self._ready[number] = self._taken.pop(number)
        self.pace.num_taken -= self._chunks_now
        self.begin_step()

    # ---- checkpoints ----

    def state(self) -> dict[str, Any]:
        running = [[draw.number, draw.version] for draw in self._running.values()]
        return {"running": running, "usable": [self._num_usable, self._num_given]}

    def carried(self) -> dict[str, DataProto]:
        """What belongs to later steps, for the files of a checkpoint."""
        parts: dict[str, DataProto | None] = {
            READY: joined([draw.rows for draw in self._ready.values()]),
            PROMPTS: joined([draw.prompt for draw in self._running.values()]),
            PARTIAL: self._generator.snapshot() if self._running else None,
            SCORES: self.scores.packed(self._ready),
        }
        return {name: part for name, part in parts.items() if part is not None}

    def load(self, state: dict[str, Any] | None, carried: dict[str, DataProto], version: int) -> None:
        """Go on from a checkpoint with the weights of `version`; `state` is None where the run was synchronous so far.

        The engines get these weights, also where the run had not sent them yet (`trigger_parameter_sync_step`): older
        ones are not kept.
        """
        self._version = self._last_step = version
        self._generator.take_weights(version)
        if state is None:
            return
        self._num_usable, self._num_given = state.get("usable", (0.0, 0.0))
        if SCORES in carried:
            self.scores.unpack(carried[SCORES])
        for rows in split_groups(carried[READY]) if READY in carried else ():
            draw = self._finished_draw(rows)
            self._ready[draw.number] = draw
            self.scores.start(draw.number, rows)
        if PROMPTS in carried:
            versions = {int(number): int(version) for number, version in state["running"]}
            draws = [
                Draw(number_of(prompt), prompt, 0, versions[number_of(prompt)]) for prompt in carried[PROMPTS].split(1)
            ]
            self._begin(draws, carried.get(PARTIAL))

    def load_taken(self, groups: Sequence[DataProto]) -> None:
        """After `load`: groups that the trainer has kept for a later step (`trained`)."""
        draws = map(self._finished_draw, groups)
        self._taken = {draw.number: draw for draw in draws}

    # ---- inside ----

    @property
    def num_batches_left(self) -> int:
        """Batches that steps will still ask for, as far as is known."""
        return max(0, self._total_steps - self._version)

    def _start_allowed(self) -> None:
        """In one call: how requests meet in an engine's batch must not depend on the time between calls."""
        draws: list[Draw] = []
        while self._may_start(len(draws)) and self._has_room(len(draws)):
            draws += self._draw_chunk()
        if draws:
            self._begin(draws, None)

    def _may_start(self, more: int) -> bool:
        num_open = len(self._ready) + len(self._running) + more
        num_filled = self._num_filled(num_open) if self._is_filtered else None
        return self.pace.may_start(math.ceil(num_open / self._count), self.num_batches_left, num_filled=num_filled)

    def _num_filled(self, num_open: int) -> float:
        """Batches since the engines' weights that dynamic sampling has filled, or is expected to."""
        num_kept = len(self._taken) - len(self._given_now)
        share = self._num_usable / self._num_given if self._num_given else 1.0
        usable = num_kept + share * (len(self._given_now) + num_open)
        return self._last_step - self._version + usable / self._num_trained

    def _has_room(self, more: int) -> bool:
        """Whether engines on the trainer's devices have use for another chunk. What only waited would grow old before
        its first token."""
        if isinstance(self._generator, OnOwnDevices) or self._settings.order_in_force == "draw":
            return True
        return len(self._running) + more < self._max_in_flight

    def _beyond_bound(self, step: int) -> list[int]:
        """Draws that no step may train on any more: of a checkpoint of a run with a higher bound, or generated ahead
        for steps that a surplus of dynamic sampling filled. Of those that are masked, newer tokens are left."""
        if self._settings.on_stale_in_force == "mask":
            return []
        draws = [*self._ready.values(), *self._running.values()]
        return sorted(draw.number for draw in draws if draw.version < step - 1 - self._bound)

    def _draw_chunk(self) -> list[Draw]:
        prompts = self._draw_prompts()
        draws = [Draw(number_of(prompt), prompt, 0, self._version) for prompt in prompts.split(1)]
        self.ledger.started([draw.number for draw in draws], self._version)
        return draws

    def _finished_draw(self, rows: DataProto) -> Draw:
        """Of a checkpoint."""
        oldest, newest = version_range(rows, self._version)
        return Draw(number_of(rows), rows, 0, oldest, rows, newest)

    def _start_lost(self) -> None:
        draws = list(self._running.values())
        while self._generator.lost() and draws:  # an engine may also die while it is given them
            self._generator.start(self._request(draws), None)

    def _begin(self, draws: Sequence[Draw], snapshot: DataProto | None) -> None:
        self._start_lost()  # first: engines that died since are new ones, and would get these draws twice
        shares = np.array_split(np.arange(len(draws)), self._generator.num_engines)
        for engine, share in enumerate(shares):
            for index in share:
                draws[index].engine = engine
        self._running.update((draw.number, draw) for draw in draws)
        self._generator.start(self._request(draws), snapshot)

    def _request(self, draws: Sequence[Draw]) -> DataProto:
        prompts = DataProto.concat([draw.prompt for draw in draws])
        request = engine_request(
            prompts,
            n=self._rollout.n,
            media_column=self._rollout.media_column,
            for_agents=self._rollout.uses_agents,
        )
        columns = {
            "uid": np.array([draw.uid for draw in draws], dtype=object),
            "engine": np.array([draw.engine for draw in draws], dtype=np.int64),
        }
        return request.union(DataProto.from_dict(non_tensors=columns))

    def _advance(self, must_finish: Sequence[int], wait_began: float) -> None:
        shares = [len(share) for share in np.array_split(np.arange(self._count), self._generator.num_engines)]
        for draw in self._ready.values():
            shares[draw.engine % len(shares)] -= 1
        # An engine that runs less than its share leaves the rest to the others.
        running = Counter(draw.engine for draw in self._running.values())
        missing = [0 if must_finish else max(0, min(share, running[engine])) for engine, share in enumerate(shares)]
        if not any(missing) and not must_finish:
            missing = [max(1, self._count - len(self._ready))] * len(shares)
        if self._waits_for_scores and self.scores.wait(_SCORE_POLL_S):
            return  # it may be the one that the step waits for
        uids = [draw_uid(number) for number in must_finish]
        self._receive_all(self._generator.advance(missing=missing, must_finish=uids))
        self._start_lost()
        self._watch(must_finish, wait_began)

    def _unscored(self) -> dict[int, Draw]:
        """Finished groups that count as running, because their scores are on the way."""
        ready = self._ready if self._waits_for_scores else {}
        return {number: draw for number, draw in ready.items() if not self.scores.are_done(number)}

    def _receive_all(self, finished: Sequence[DataProto]) -> None:
        for part in finished:
            for rows in split_groups(part):
                self._receive(rows)

    def _receive(self, rows: DataProto) -> None:
        draw = self._running.pop(number_of(rows), None)
        if draw is None:  # started again after a death, and there already
            return
        draw.rows = join_answers(draw.prompt, rows, n=self._rollout.n)
        draw.version, draw.newest = version_range(rows, draw.version)
        self._ready[draw.number] = draw
        self.ledger.finished(draw.number, version_runs(rows), restarted=num_restarted(rows))
        self.scores.start(draw.number, draw.rows)

    def _watch(self, must_finish: Sequence[int], wait_began: float) -> None:
        last_token = max(wait_began, self._generator.last_progress())
        self.waits.clear()
        unscored, calls = self._unscored(), self._generator.tool_calls()
        for number in must_finish or sorted([*self._running, *unscored])[: self._count]:
            if number in self._running:
                engine = self._running[number].engine
                self.waits.waiting("the trainer", f"draw {number}", since=wait_began)
                if call := calls.get(draw_uid(number)):
                    name, began = call
                    self.waits.waiting(f"draw {number}", f"tool {name}", since=max(last_token, began))
                else:
                    self.waits.waiting(f"draw {number}", f"engine {engine}", "engine", since=last_token)
            elif number in unscored:
                self.scores.watch(self.waits, [number], wait_began, self._settings.stall_timeout_s)
        self._check_waits()

    def _check_waits(self) -> None:
        now = time.monotonic()
        self._on_wait(self.waits.words(now))
        self.waits.check(now, self._settings.stall_timeout_s)

    def _drop(self, numbers: Sequence[int]) -> None:
        running = [draw_uid(number) for number in numbers if number in self._running]
        if running:
            self._generator.abort(running)
        for number in numbers:
            self._ready.pop(number, None)
            self._running.pop(number, None)
            self.scores.forget([number])
            self._dropped_now.append((number, "too old"))

    def _give(self, numbers: Sequence[int], step: int) -> DataProto:
        draws = [self._ready.pop(number) for number in numbers]
        self._taken.update((draw.number, draw) for draw in draws)
        self._given_now += numbers
        self._given_at = time.monotonic()
        self._chunks_now += 1
        self.pace.num_taken += 1
        batch = DataProto.concat([draw.rows for draw in draws if draw.rows is not None])
        if self._settings.order_in_force == "finish" and self._settings.on_stale_in_force == "mask":
            batch = mask_older(batch, step - 1 - self._bound)
        return batch
