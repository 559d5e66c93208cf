"""Predicted steps, by hand where a hand can count them; speeds from the records of a run."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.config.root import DovetailConfig
from dovetail.observability.ledger import DrawLedger, read_ledger, violations
from dovetail.observability.run_folder import RunFolder
from dovetail.protocol import DataProto
from dovetail.rollout.assemble import assemble
from dovetail.rollout.base import GenerationResult
from dovetail.trainer import rollout_stream
from dovetail.trainer.async_plan import RecordsError, make_async_plan
from dovetail.trainer.dapo import RayDAPOTrainer
from dovetail.trainer.generators import Generator, draw_number
from dovetail.trainer.rollout_stream import RolloutStream
from dovetail.trainer.run_speeds import long_tailed_groups, read_records
from dovetail.trainer.simulate import (
    Schedule,
    SimulatedEngine,
    SimulatedGroup,
    SimulatedRun,
    Speeds,
    decode_steps,
    predict,
)
from tests.trainer.toy_run import DAPO, Toy, numbered_prompts

pytestmark = pytest.mark.unit

SPEEDS = Speeds(0.5, 0.25, 3.0, 0.125, prefill_token_s=0.0625)
LENGTHS = long_tailed_groups(6, 40, n=4, longest=64, count=24)


def schedule(max_staleness: int = 0, **changes: Any) -> Schedule:
    keys: dict[str, Any] = {"num_engines": 1, "max_num_seqs": 8, "groups_per_step": 2, "max_staleness": max_staleness}
    return Schedule(**{**keys, **changes})


def test_taking_turns_is_the_longest_response_and_then_training() -> None:
    step = predict(schedule(), Speeds(1.0, 0.5, 10.0, 1.0), [[4], [8]], prompt_length=1.0)
    # Four steps of two sequences, four of one; then 14 tokens.
    assert step.step_s == pytest.approx(4 * 2.0 + 4 * 1.5 + 24.0)
    assert step.train_s == 24.0
    assert step.trainer_idle == pytest.approx(14 / 38)
    assert step.engine_idle == pytest.approx(24 / 38)
    assert step.staleness_max == 0


@pytest.mark.parametrize(("length", "train_s"), [(8, 10.0), (12, 10.0)])
def test_one_step_off_hides_the_shorter_side(length: int, train_s: float) -> None:
    settings = schedule(1, finishes_before_update=True)
    step = predict(settings, Speeds(1.0, 0.0, train_s, 0.0), [[length], [length]])
    longer = max(length, train_s)
    assert step.step_s == longer
    assert step.trainer_idle == pytest.approx(1 - train_s / longer)
    assert step.engine_idle == pytest.approx(1 - length / longer)
    assert (step.staleness_mean, step.staleness_max) == (1, 1)


def test_a_bound_that_no_run_reaches_is_predicted_as_one_beyond_the_steps() -> None:
    beyond = [predict(schedule(bound, order="finish"), SPEEDS, LENGTHS, steps=20) for bound in (20, 10**9)]
    assert beyond[0] == beyond[1]


def test_engines_that_never_drain_do_not_wait_for_the_longest_response() -> None:
    """One sequence at a time: the time of a step is that of its tokens, whatever their order."""
    groups = [[1], [39], [2], [2], [30], [1], [4], [1]]
    settings = schedule(3, max_num_seqs=1, order="finish")
    step = predict(settings, Speeds(1.0, 0.0, 0.5, 0.0), groups, steps=200)
    assert step.step_s == pytest.approx(2 * sum(map(sum, groups)) / len(groups), rel=0.02)
    assert step.engine_idle < 0.02
    assert step.staleness_max <= 3


def test_new_weights_cost_an_engine_what_it_reads_again() -> None:
    plain = Speeds(1.0, 0.0, 3.0, 0.0)
    again = Speeds(1.0, 0.0, 3.0, 0.0, prefill_token_s=0.5)
    settings = schedule(2, order="finish")
    groups = [[9], [3], [7], [5]]
    assert predict(settings, again, groups).step_s > predict(settings, plain, groups).step_s
    drained = schedule(1, finishes_before_update=True)
    assert predict(drained, again, groups) == predict(drained, plain, groups)


def test_on_shared_devices_a_step_takes_what_is_finished_and_carries_the_rest() -> None:
    groups = [[1], [20]] * 8
    speeds = Speeds(1.0, 0.0, 10.0, 0.0)
    carried = predict(schedule(3, order="finish", shares_devices=True), speeds, groups)
    drained = predict(schedule(0, shares_devices=True), speeds, groups)
    assert drained.step_s == 30.0
    assert 10.0 < carried.step_s < drained.step_s


def test_decode_steps_count_batches_that_are_filled_up() -> None:
    assert decode_steps([[5], [3], [4]], num_engines=1, max_num_seqs=8) == 5
    assert decode_steps([[5], [3], [4]], num_engines=1, max_num_seqs=2) == 7
    assert decode_steps([[5, 5], [3, 3]], num_engines=2, max_num_seqs=1) == 10


def test_long_tailed_lengths_have_the_median_and_the_percentile_asked_for() -> None:
    lengths = sorted(length for group in long_tailed_groups(200, 2000, n=4, longest=100_000) for length in group)
    assert lengths[len(lengths) // 2] == pytest.approx(200, rel=0.01)
    assert lengths[int(len(lengths) * 0.99)] == pytest.approx(2000, rel=0.05)


def write_run(toy: Toy, folder: Path, **changes: Any) -> None:
    """Steps of a run with exactly these speeds: 0.01 s and 0.002 s a sequence to decode, 1 s and 0.003 s a token."""
    run = RunFolder(folder)
    run.write_config(toy.config(folder, changes).model_dump(mode="json"))
    for step in range(1, 9):
        lengths = [3 + (5 * step + 7 * group) % 11 for group in range(4)]
        tokens = 4 * sum(lengths) + 16 * 10
        generation = 0.01 * max(lengths) + 0.002 * 4 * sum(lengths) + 0.001 * 160
        rows = [
            {"uid": f"draw-{group}", "response_length": length} for group, length in enumerate(lengths) for _ in "1234"
        ]
        run.write_answers(step, rows)
        timing = {"timing_s/gen": generation, "timing_s/step": generation + 1 + 0.003 * tokens}
        run.log_metrics(step, {"perf/total_num_tokens": float(tokens), "prompt_length/mean": 10.0, **timing})


def test_speeds_are_those_of_the_records(toy: Toy, tmp_path: Path) -> None:
    write_run(toy, tmp_path)
    records = read_records(tmp_path)
    speeds = records.speeds
    assert (speeds.decode_step_s, speeds.decode_token_s) == pytest.approx((0.01, 0.002))
    assert (speeds.train_step_s, speeds.train_token_s, speeds.prefill_token_s) == pytest.approx((1.0, 0.003, 0.001))
    assert len(records.groups) == 6 * 4, "without the first two steps"
    assert records.prompt_length == 10


def test_the_plan_of_an_asynchronous_run_scales_training_with_its_devices(toy: Toy, tmp_path: Path) -> None:
    write_run(toy, tmp_path)
    keys = {
        "async_training.mode": "fully_async",
        "async_training.max_staleness": 1,
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 2,
    }
    records = read_records(tmp_path)
    one: Any = make_async_plan(toy.config(tmp_path, keys), records)
    two: Any = make_async_plan(toy.config(tmp_path, {**keys, "trainer.n_gpus_per_node": 2}), records)
    assert (one.train_devices, one.generation_devices, one.num_engines, one.groups_ahead) == (1, 2, 2, 8)
    assert two.prediction.train_s == pytest.approx(one.prediction.train_s / 2, rel=0.05)
    assert one.prediction.step_s < one.taking_turns.step_s
    assert not one.is_filtered
    filtered: Any = make_async_plan(toy.config(tmp_path, {**keys, **DAPO}))
    assert filtered.is_filtered
    assert make_async_plan(toy.config(tmp_path), records) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"async_training.mode": "fully_async"}, "is an asynchronous run"), (None, "is no run folder")],
)
def test_a_run_that_says_nothing_of_speeds_is_refused(
    toy: Toy, tmp_path: Path, changes: dict[str, Any] | None, says: str
) -> None:
    if changes is not None:
        write_run(toy, tmp_path, **changes)
    with pytest.raises(RecordsError, match=says):
        read_records(tmp_path)


class OnSimulatedTime(Generator):
    """The simulation's engine behind the stream that real runs use."""

    def __init__(self, *args: Any) -> None:
        self.engine = SimulatedEngine(SPEEDS, max_num_seqs=6)
        self.finished: list[SimulatedGroup] = []
        self.now = 0.0

    @property
    def num_engines(self) -> int:
        return 1

    def start(self, request: DataProto, snapshot: DataProto | None) -> None:
        for number in map(draw_number, request.non_tensor_batch["uid"]):
            self.engine.start(SimulatedGroup(number, LENGTHS[number % len(LENGTHS)], self.engine.version))

    def run(self, until: float) -> None:
        self.now = max(self.now, until)
        self.finished += self.engine.run(self.now)

    def collect(self) -> list[DataProto]:
        finished, self.finished = self.finished, []
        return [_rows(group) for group in finished]

    def advance(self, *, missing: Sequence[int], must_finish: Sequence[str]) -> list[DataProto]:
        if not self.finished:
            self.run(self.engine.next_end())
        return self.collect()

    def snapshot(self) -> DataProto | None:
        return None

    def abort(self, uids: Sequence[str]) -> None: ...

    def take_weights(self, version: int) -> dict[str, float]:
        self.engine.take_weights(version)
        return {}


def _rows(group: SimulatedGroup) -> DataProto:
    versions = [group.version, group.newest]
    results = [GenerationResult("", index, [5, 6], [-1.0, -1.0], "length", versions) for index in range(4)]
    rows = assemble([[1]] * 4, results, pad_token_id=0)
    return rows.union(DataProto.from_dict(non_tensors={"uid": np.array([f"draw-{group.number}"] * 4, dtype=object)}))


@pytest.mark.parametrize(
    "settings",
    [{"mode": "one_step_off"}, {"max_staleness": 1}, {"max_staleness": 3}, {"max_staleness": 2, "order": "draw"}],
    ids=["one_step_off", "bound 1", "bound 3", "in order"],
)
def test_the_simulated_run_takes_the_groups_that_the_stream_takes(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """The stream itself over the same engine: equal times and ages in every step."""
    keys = {
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 1,
        "actor_rollout_ref.rollout.max_num_seqs": 6,
        **{f"async_training.{name}": value for name, value in {"mode": "fully_async", **settings}.items()},
    }
    config = toy.config(tmp_path, keys)
    monkeypatch.setattr(rollout_stream, "OnOwnDevices", OnSimulatedTime)
    groups: Any = SimpleNamespace(engines=object())
    stream = RolloutStream(config, groups, DrawLedger(tmp_path), draw_prompts=numbered_prompts(4, [1]), total_steps=40)
    generator: Any = stream._generator
    simulated = SimulatedRun(Schedule.of(config), SPEEDS, itertools.cycle(LENGTHS), prompt_length=0.0)
    assert config.staleness_bound > 0
    for step in range(1, 31):
        ages = simulated.step(step, batches_left=40 - (step - 1))
        stream.begin_step()
        batch = stream.next(step)
        numbers = list(dict.fromkeys(map(draw_number, batch.non_tensor_batch["uid"])))
        tokens = sum(sum(LENGTHS[number % len(LENGTHS)]) for number in numbers)
        generator.run(generator.now + SPEEDS.train_step_s + SPEEDS.train_token_s * tokens)
        stream.collect()
        oldest = batch.tensors["weight_version"].masked_fill(batch.tensors["weight_version"] < 0, 99).amin(dim=1)
        assert [step - 1 - version for version in oldest.tolist()[::4]] == ages
        stream.trained(step, [f"draw-{number}" for number in numbers])
        stream.update(step, step)
        assert generator.now == pytest.approx(simulated.now)


class SimulatedDAPO(RayDAPOTrainer):
    """Its choice of groups, over a stream of groups that have a signal by chance."""

    def __init__(self, config: DovetailConfig, stream: RolloutStream, share: float) -> None:
        self.config, self.stream, self._share = config, stream, share
        self._surplus, self._rounds = None, []

    def step(self, step: int) -> None:
        """Without the training, which takes three times `SPEEDS.train_step_s`."""
        assert self.stream is not None
        generator: Any = self.stream._generator
        count, self.global_step = self.config.data.train_batch_size, step
        self.stream.begin_step()
        groups, _ = self._fill_batch(count)
        self._surplus = DataProto.concat(groups[count:]) if groups[count:] else None
        used, kept = ([group.non_tensor_batch["uid"][0] for group in some] for some in (groups[:count], groups[count:]))
        generator.run(generator.now + 3 * SPEEDS.train_step_s)
        self.stream.collect()
        self.stream.trained(step, used, kept=kept)
        self.stream.update(step, step)

    def _scored_batch(self) -> DataProto:
        self._rounds.append({})
        assert self.stream is not None
        return self.stream.next(self.global_step)

    def _has_signal(self, group: DataProto) -> bool:
        return random.Random(str(group.non_tensor_batch["uid"][0])).random() < self._share


@pytest.mark.parametrize(
    ("share", "round_size", "bound", "on_stale"),
    [(0.3, 4, 1, "drop"), (0.5, 12, 1, "drop"), (0.7, 12, 2, "drop"), (0.3, 4, 1, "wait"), (0.9, 6, 1, "mask")],
)
def test_dynamic_sampling_generates_little_that_grows_too_old_and_waits_for_little(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, round_size: int, bound: int, on_stale: str
) -> None:
    steps = 40
    keys = {
        **DAPO,
        "algorithm.filter_groups.max_num_gen_batches": 0,
        "data.gen_batch_size": round_size,
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 1,
        "async_training.mode": "fully_async",
        "async_training.max_staleness": bound,
        "async_training.on_stale": on_stale,
    }
    config = toy.config(tmp_path, keys)
    monkeypatch.setattr(rollout_stream, "OnOwnDevices", OnSimulatedTime)
    groups: Any = SimpleNamespace(engines=object())
    prompts = numbered_prompts(round_size, [1])
    stream = RolloutStream(config, groups, DrawLedger(tmp_path), draw_prompts=prompts, total_steps=steps)
    generator: Any = stream._generator
    generator.engine = SimulatedEngine(Speeds(0.1, 0.0, 0.0, 0.0), max_num_seqs=64)
    trainer = SimulatedDAPO(config, stream, share)
    for step in range(1, steps + 1):
        trainer.step(step)
    ledger = read_ledger(tmp_path)
    assert ledger is not None
    assert list(violations(ledger, bound=config.group_staleness_bound, masks_stale=on_stale == "mask")) == []
    assert ledger.counts()["dropped (too old)"] <= 0.05 * len(ledger.draws), ledger.counts()
    assert len(ledger.draws) <= 1.2 * steps * 4 / share
    longer = max(generator.engine.busy, steps * 3 * SPEEDS.train_step_s)
    assert generator.now < 1.4 * longer, "the engine was idle while a step waited, and again while it trained"


@pytest.mark.parametrize("seed", range(40))
def test_every_schedule_comes_to_an_end_and_keeps_its_bound(seed: int) -> None:
    rng = random.Random(seed)
    groups = long_tailed_groups(rng.randint(2, 50), rng.randint(60, 800), n=rng.randint(1, 8), longest=1000, count=32)
    settings = schedule(
        rng.randint(0, 5),
        num_engines=rng.randint(1, 4),
        max_num_seqs=rng.randint(1, 64),
        groups_per_step=rng.randint(1, 24),
        order=rng.choice(["finish", "draw"]),
        on_stale=rng.choice(["wait", "drop"]),
        finishes_before_update=rng.random() < 0.3,
        shares_devices=rng.random() < 0.5,
        max_in_flight=rng.choice([None, 1, 5, 40]),
    )
    speeds = Speeds(rng.random(), rng.random() * 0.1, rng.random() * 10, rng.random() * 0.01, rng.random() * 0.01)
    step = predict(settings, speeds, groups, steps=10)
    assert 0.999 * step.train_s <= step.step_s < math.inf
    assert step.staleness_max <= settings.max_staleness
