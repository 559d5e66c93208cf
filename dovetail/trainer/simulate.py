"""Predict the steps of a run: the scheduler itself (`pace`), over engines and a trainer that only count time.

Lengths and speeds come from elsewhere (`run_speeds`). Imports neither torch nor numpy.

An engine's decode step takes `decode_step_s` and `decode_token_s` for each sequence in it; new weights make it read
what it has of every running sequence again. Training takes `train_step_s`, and `train_token_s` for each token.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dovetail.config.root import DovetailConfig
from dovetail.trainer.pace import OnStale, Order, Pace, choose

WARM_UP_STEPS = 2
"""Steps that are left out, beside as many as generation may be ahead."""

Lengths = Sequence[int]
"""Tokens of the responses of one group."""


@dataclass(frozen=True)
class Speeds:
    """Seconds, of one engine and of the trainer's devices together."""

    decode_step_s: float
    decode_token_s: float
    train_step_s: float
    train_token_s: float
    prefill_token_s: float = 0.0
    weight_sync_s: float = 0.0

    def decode(self, num_sequences: int) -> float:
        return self.decode_step_s + self.decode_token_s * num_sequences


@dataclass(frozen=True)
class Prediction:
    """Means over the steps after warm-up; `idle` are shares of the time. Staleness is that of groups."""

    step_s: float
    train_s: float
    engine_idle: float
    trainer_idle: float
    staleness_mean: float
    staleness_max: int


@dataclass(frozen=True)
class Schedule:
    """What the scheduler reads of a configuration."""

    num_engines: int
    max_num_seqs: int
    groups_per_step: int
    max_staleness: int
    order: Order = "draw"
    on_stale: OnStale = "wait"
    finishes_before_update: bool = False
    steps_per_update: int = 1
    shares_devices: bool = False
    """Engines and trainer take turns on the same devices."""
    max_in_flight: int | None = None
    """Groups that may have begun on shared devices."""

    @property
    def groups_in_flight(self) -> int:
        return self.max_in_flight or self.groups_per_step + math.ceil(self.groups_per_step / 8)

    @classmethod
    def of(cls, config: DovetailConfig) -> Schedule:
        settings, rollout = config.async_training, config.actor_rollout_ref.rollout
        shares = config.actor_rollout_ref.hybrid_engine
        devices = config.trainer.world_size if shares else rollout.own_devices
        return cls(
            num_engines=max(1, devices // rollout.engine_world_size),
            max_num_seqs=rollout.max_num_seqs,
            groups_per_step=config.generation_batch_size,
            max_staleness=settings.staleness_bound,
            order=settings.order_in_force,
            on_stale=settings.on_stale_in_force,
            finishes_before_update=settings.finishes_before_update,
            steps_per_update=settings.trigger_parameter_sync_step,
            shares_devices=shares,
            max_in_flight=settings.max_in_flight,
        )


@dataclass(eq=False)
class SimulatedGroup:
    """A draw, as `pace` sees it."""

    number: int
    lengths: Lengths
    version: int
    newest: int = 0
    unfinished: int = 0
    begun: bool = False
    first_version: int = 0
    """Of its oldest token; `version` once it is finished."""


@dataclass(eq=False)
class _Sequence:
    group: SimulatedGroup
    length: int
    done: float = 0.0


@dataclass(eq=False)
class SimulatedEngine:
    """Decodes what is in its batch, and fills it up as sequences end."""

    speeds: Speeds
    max_num_seqs: int
    now: float = 0.0
    busy: float = 0.0
    version: int = 0
    room: float = math.inf
    """Groups that may still begin."""
    waiting: deque[_Sequence] = field(default_factory=deque)
    batch: list[_Sequence] = field(default_factory=list)

    def start(self, group: SimulatedGroup) -> None:
        self.waiting.extend(_Sequence(group, length) for length in group.lengths)
        group.unfinished = len(group.lengths)

    @property
    def num_begun(self) -> int:
        """Unfinished groups that have begun."""
        return len({each.group.number for each in (*self.batch, *self.waiting) if each.group.begun})

    def next_end(self) -> float:
        """When the next sequence ends; never, without any."""
        self._fill()
        if not self.batch:
            return math.inf
        return self.now + min(each.length - each.done for each in self.batch) * self.speeds.decode(len(self.batch))

    def run(self, until: float) -> list[SimulatedGroup]:
        """Generate up to this time; returns the groups that are complete."""
        complete: list[SimulatedGroup] = []
        while self.now < until:
            end = self.next_end()
            if end == math.inf:
                self.now = until
                break
            stop = min(end, until)
            steps = (stop - self.now) / self.speeds.decode(len(self.batch))
            self.busy += stop - self.now
            self.now = stop
            for sequence in self.batch:
                sequence.done += steps
            complete += self._take_ended()
        return complete

    def take_weights(self, version: int) -> None:
        self.version = version
        spent = self.speeds.prefill_token_s * sum(sequence.done for sequence in self.batch)
        self.now += spent
        self.busy += spent

    def _fill(self) -> None:
        while self.waiting and len(self.batch) < self.max_num_seqs:
            group = self.waiting[0].group
            if not group.begun:
                if self.room < 1:
                    return
                self.room -= 1
                group.begun, group.first_version = True, self.version
            self.batch.append(self.waiting.popleft())

    def _take_ended(self) -> list[SimulatedGroup]:
        complete = []
        ended = [sequence for sequence in self.batch if sequence.length - sequence.done < 1e-6]
        self.batch = [sequence for sequence in self.batch if sequence.length - sequence.done >= 1e-6]
        for sequence in ended:
            group = sequence.group
            group.unfinished -= 1
            group.newest = self.version
            if not group.unfinished:
                group.version = group.first_version
                complete.append(group)
        return complete


class SimulatedRun:
    """`RolloutStream` and a trainer in small, over the same `Pace` and `choose`."""

    def __init__(self, schedule: Schedule, speeds: Speeds, groups: Iterator[Lengths], prompt_length: float) -> None:
        self._schedule = schedule
        self._speeds = speeds
        self._groups = groups
        self._prompt_length = prompt_length
        self._pace = Pace(schedule.max_staleness)
        self._engines = [SimulatedEngine(speeds, schedule.max_num_seqs) for _ in range(schedule.num_engines)]
        self._ready: dict[int, SimulatedGroup] = {}
        self._running: dict[int, SimulatedGroup] = {}
        self._numbers = itertools.count()
        self._version = 0
        self.now = 0.0
        self.training = 0.0

    def busy(self) -> float:
        return sum(engine.busy for engine in self._engines) / len(self._engines)

    def step(self, step: int, batches_left: int) -> list[int]:
        """One step; returns how old its groups are."""
        self._start_allowed(batches_left)
        chosen = self._wait_for_groups(step)
        tokens = sum(sum(group.lengths) + self._prompt_length * len(group.lengths) for group in chosen)
        self._train(self._speeds.train_step_s + self._speeds.train_token_s * tokens)
        self._pace.num_taken += 1
        if step % self._schedule.steps_per_update == 0:
            while self._schedule.finishes_before_update and self._running:
                self._generate_next()
            self._train(self._speeds.weight_sync_s)
            self._version = step
            self._pace.num_taken_at_update = self._pace.num_taken
            for engine in self._engines:
                engine.take_weights(step)
        return [step - 1 - group.version for group in chosen]

    def _wait_for_groups(self, step: int) -> list[SimulatedGroup]:
        schedule = self._schedule
        if schedule.shares_devices:
            most = max(schedule.groups_in_flight, schedule.groups_per_step) / schedule.num_engines
            for engine in self._engines:
                engine.room = math.ceil(most) - engine.num_begun
        while True:
            choice = choose(
                self._ready.values(),
                self._running.values(),
                count=schedule.groups_per_step,
                step=step,
                max_staleness=schedule.max_staleness,
                order=schedule.order,
                on_stale=schedule.on_stale,
            )
            for number in choice.too_old:
                self._ready.pop(number, None)
                self._running.pop(number, None)
            if choice.chosen is not None:
                return [self._ready.pop(number) for number in choice.chosen]
            if len(self._ready) + len(self._running) < schedule.groups_per_step:
                self._start_chunk()
            self._generate_next()

    def _generate_next(self) -> None:
        """Until the next sequence ends."""
        end = min(engine.next_end() for engine in self._engines)
        if end == math.inf:  # what is needed has not begun
            for engine in self._engines:
                engine.room = math.inf
            end = min(engine.next_end() for engine in self._engines)
        self._generate(end)

    def _train(self, seconds: float) -> None:
        self.training += seconds
        if self._schedule.shares_devices:
            self.now += seconds
            for engine in self._engines:
                engine.now = self.now
        else:
            self._generate(self.now + seconds)

    def _generate(self, until: float) -> None:
        self.now = max(self.now, until)
        for engine in self._engines:
            for group in engine.run(self.now):
                if self._running.pop(group.number, None) is not None:
                    self._ready[group.number] = group

    def _start_allowed(self, batches_left: int) -> None:
        while self._pace.may_start(self._num_open(), batches_left) and self._has_room():
            self._start_chunk()

    def _num_open(self) -> int:
        return math.ceil((len(self._ready) + len(self._running)) / self._schedule.groups_per_step)

    def _has_room(self) -> bool:
        """As in `RolloutStream`."""
        schedule = self._schedule
        if not schedule.shares_devices or schedule.order == "draw":
            return True
        return len(self._running) < schedule.groups_in_flight

    def _start_chunk(self) -> None:
        count, engines = self._schedule.groups_per_step, len(self._engines)
        for index, lengths in enumerate(itertools.islice(self._groups, count)):
            group = SimulatedGroup(next(self._numbers), lengths, self._version)
            self._running[group.number] = group
            self._engines[index * engines // count].start(group)


def predict(
    schedule: Schedule, speeds: Speeds, groups: Sequence[Lengths], *, prompt_length: float = 0.0, steps: int = 50
) -> Prediction:
    """Simulate `steps` steps over these groups, again and again in their order."""
    # A bound beyond the simulated steps is as good as none: it would only start what they never use.
    schedule = replace(schedule, max_staleness=min(schedule.max_staleness, steps))
    run = SimulatedRun(schedule, speeds, itertools.cycle(groups), prompt_length)
    warm_up = WARM_UP_STEPS + schedule.max_staleness
    ages: list[int] = []
    began = training = busy = 0.0
    for step in range(1, warm_up + steps + 1):
        stale = run.step(step, batches_left=steps + warm_up + schedule.max_staleness + 1)
        if step == warm_up:
            began, training, busy = run.now, run.training, run.busy()
        elif step > warm_up:
            ages += stale
    span = run.now - began
    return Prediction(
        step_s=span / steps,
        train_s=(run.training - training) / steps,
        engine_idle=max(0.0, 1 - (run.busy() - busy) / span),
        trainer_idle=max(0.0, 1 - (run.training - training) / span),
        staleness_mean=statistics.fmean(ages),
        staleness_max=max(ages),
    )


def decode_steps(groups: Iterable[Lengths], *, num_engines: int, max_num_seqs: int) -> float:
    """Decode steps of the engine that has most of them, from empty to empty."""
    groups = list(groups)
    counting = Speeds(1.0, 0.0, 0.0, 0.0)
    engines = [SimulatedEngine(counting, max_num_seqs) for _ in range(num_engines)]
    for index, lengths in enumerate(groups):
        engines[index * num_engines // len(groups)].start(SimulatedGroup(index, lengths, 0))
    while any(engine.waiting or engine.batch for engine in engines):
        for engine in engines:
            if engine.waiting or engine.batch:
                engine.run(engine.next_end())
    return max(engine.busy for engine in engines)
