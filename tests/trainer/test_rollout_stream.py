"""The driver's stream of draws over a generator that a test controls: stalls, drops, scores, what is started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.observability.ledger import DrawLedger, read_ledger
from dovetail.observability.stalls import StalledError
from dovetail.protocol import DataProto
from dovetail.rewards.errors import Failure
from dovetail.rollout.assemble import assemble
from dovetail.rollout.base import GenerationResult
from dovetail.trainer import rollout_stream
from dovetail.trainer.generators import Generator, OnOwnDevices, OnTrainerDevices
from dovetail.trainer.group_rows import within_bound
from dovetail.trainer.group_scores import GroupScores
from dovetail.trainer.rollout_stream import RolloutStream
from tests.trainer.toy_run import Toy, numbered_prompts

N, GROUPS = 4, 4
STALL_S = 0.5


class Scripted(Generator):
    """Finishes `finishing` draws with each call, the newest first; says that it lost everything when told to."""

    def __init__(self, *args: Any) -> None:
        self.finishing = 1
        self.started: list[list[str]] = []
        self.waiting: list[str] = []
        self.aborted: list[str] = []
        self.is_lost = self.dies_next = self.dies_in_start = False
        self.version = 0
        self.progress: float | None = None

    @property
    def num_engines(self) -> int:
        return 1

    def start(self, request: DataProto, snapshot: DataProto | None) -> None:
        uids = [str(uid) for uid in request.non_tensor_batch["uid"]]
        assert not set(uids) & set(self.waiting), "an engine refuses what it already generates"
        self.started.append(uids)
        if self.dies_in_start:
            self.dies_in_start, self.is_lost, uids = False, True, []
        self.waiting += uids

    def advance(self, *, missing: Sequence[int], must_finish: Sequence[str]) -> list[DataProto]:
        done = [self.waiting.pop() for _ in range(min(self.finishing, len(self.waiting)))]
        if self.dies_next:
            self.dies_next, self.is_lost, self.waiting = False, True, []
        return [group(uid, self.version) for uid in done]

    def collect(self) -> list[DataProto]:
        return self.advance(missing=(), must_finish=())

    def snapshot(self) -> DataProto | None:
        return None

    def abort(self, uids: Sequence[str]) -> None:
        self.aborted += uids
        self.waiting = [uid for uid in self.waiting if uid not in uids]

    def take_weights(self, version: int) -> dict[str, float]:
        self.version = version
        return {}

    def lost(self) -> bool:
        was, self.is_lost = self.is_lost, False
        return was

    def last_progress(self) -> float:
        return super().last_progress() if self.progress is None else self.progress


def group(uid: str, version: int) -> DataProto:
    results = [GenerationResult(uid, index, [5, 6], [-1.0, -1.0], "length", [version] * 2) for index in range(N)]
    rows = assemble([[1]] * N, results, pad_token_id=0)
    return rows.union(DataProto.from_dict(non_tensors={"uid": np.array([uid] * N, dtype=object)}))


class Scores:
    """Ends scoring when the test does; of the draws of `at_once`, as soon as it starts."""

    def __init__(self, *at_once: int) -> None:
        self.at_once = {f"draw-{number}" for number in at_once}
        self.futures: dict[str, list[Future[Any]]] = {}

    def __call__(self, rows: DataProto) -> list[Future[Any]]:
        (uid,) = uids(rows)
        assert uid not in self.futures, "scored twice"
        self.futures[uid] = [Future() for _ in range(len(rows))]
        if uid in self.at_once:
            self.finish(uid)
        return self.futures[uid]

    def finish(self, *names: str) -> None:
        for uid in names:
            for future in self.futures[uid]:
                future.set_result({"score": 1.0})


Make = Callable[..., tuple[RolloutStream, Scripted]]


@pytest.fixture
def make(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A stream over a scripted generator, with its ledger in `tmp_path` or a folder in it."""

    def made(
        scores: Scores | None = None,
        *,
        apart: bool = False,
        folder: str = "",
        kind: type[Scripted] = Scripted,
        waits: list[str] | None = None,
        **settings: Any,
    ) -> tuple[RolloutStream, Scripted]:
        keys = {"mode": "fully_async", "max_staleness": 1, **settings}
        config = toy.config(tmp_path / folder, {f"async_training.{name}": value for name, value in keys.items()})
        monkeypatch.setattr(rollout_stream, "OnOwnDevices" if apart else "OnTrainerDevices", kind)
        groups: Any = type("Groups", (), {"engines": object() if apart else None, "actor_rollout": None})()
        stream = RolloutStream(
            *(config, groups, DrawLedger(tmp_path / folder)),
            draw_prompts=numbered_prompts(GROUPS, [1]),
            total_steps=9,
            scores=GroupScores(scores),
            on_wait=([] if waits is None else waits).append,
        )
        generator: Any = stream._generator
        return stream, generator

    return made


def uids(batch: DataProto) -> list[str]:
    return list(dict.fromkeys(batch.non_tensor_batch["uid"].tolist()))


def test_an_engine_that_generates_nothing_is_named(make: Make) -> None:
    waits: list[str] = []
    stream, generator = make(stall_timeout_s=0.2, waits=waits)
    generator.finishing, generator.progress = 0, 0.0
    with pytest.raises(StalledError, match=r"the trainer waits for draws? 0.*waits for engine 0"):
        stream.next(1)
    assert all("the trainer waits for draws 0" in words and "waits for engine 0" in words for words in waits)
    assert len(waits) > 1, "it is said before the run ends"


def test_what_was_lost_is_started_again_once(make: Make) -> None:
    stream, generator = make()
    generator.dies_next = True
    stream.begin_step()
    batch = stream.next(1)
    first, again = generator.started[:2]
    assert set(again) < set(first), "one had finished before the loss"
    assert len(uids(batch)) == GROUPS


@pytest.mark.parametrize("num_deaths", [1, 2])
def test_what_was_lost_while_the_trainer_was_busy_is_started_again_before_anything_new(
    make: Make, num_deaths: int
) -> None:
    """As when an engine dies and the next weights meet a new one, which may die, too."""
    stream, generator = make()
    stream.begin_step()
    stream.trained(1, uids(stream.next(1)))
    running, before = list(generator.waiting), len(generator.started)
    assert running
    generator.is_lost, generator.waiting, generator.dies_in_start = True, [], num_deaths == 2
    stream.update(1, 1)
    *again_each_time, new = generator.started[before:]
    assert len(again_each_time) == num_deaths
    again = again_each_time[-1]
    assert sorted(again) == sorted(running)
    assert not set(new) & set(again)
    assert len(uids(stream.next(2))) == GROUPS


@pytest.mark.parametrize("on_stale", ["drop", "wait"])
def test_a_group_that_is_passed_over_is_dropped_or_waited_for(make: Make, tmp_path: Path, on_stale: str) -> None:
    """The newest draws finish first, so without a bound the first ones would never be trained on."""
    stream, generator = make(on_stale=on_stale)
    for step in range(1, 7):
        stream.begin_step()
        stream.trained(step, uids(stream.next(step)))
        stream.update(step, step)
    ledger = read_ledger(tmp_path)
    assert ledger is not None
    counts = ledger.counts()
    assert counts["trained"] == 6 * GROUPS
    assert (counts["dropped (too old)"] > 0) == (on_stale == "drop") == bool(generator.aborted)
    assert max(record.staleness() or 0 for record in ledger.draws.values()) <= 1


def test_groups_that_are_dropped_do_not_slow_the_pace(make: Make, tmp_path: Path) -> None:
    stream, _ = make(apart=True, on_stale="drop")
    ahead = []
    for step in range(1, 7):
        stream.begin_step()
        stream.trained(step, uids(stream.next(step)))
        metrics = stream.update(step, step)
        ahead.append(metrics["async/groups_ready"] + metrics["async/groups_running"])
    ledger = read_ledger(tmp_path)
    assert ledger is not None
    assert ledger.counts()["dropped (too old)"] >= 2 * GROUPS, "the run shows nothing"
    assert min(ahead) > GROUPS, f"with a bound of 1 two batches may be open, and were not: {ahead}"


def test_a_step_that_is_given_up_leaves_its_groups_for_the_next(make: Make) -> None:
    stream, _ = make()
    stream.begin_step()
    given = uids(stream.next(1))
    stream.undo_step(0)
    assert stream.pace.num_taken == 0
    stream.begin_step()
    assert uids(stream.next(1)) == given


def test_groups_are_scored_while_the_trainer_updates_and_the_next_step_need_not_wait(make: Make) -> None:
    scores = Scores(4, 5, 6, 7)
    stream, generator = make(scores, apart=True)
    stream.begin_step()
    assert uids(stream.next(1)) == ["draw-4", "draw-5", "draw-6", "draw-7"], "the newest finish first here"
    generator.finishing = GROUPS
    stream.collect()  # what the trainer calls while its workers update
    assert set(scores.futures) == {f"draw-{number}" for number in range(8)}
    scores.finish("draw-0", "draw-1", "draw-2", "draw-3")
    stream.trained(1, [f"draw-{number}" for number in range(4, 8)])
    stream.update(1, 1)
    generator.finishing = 0
    assert uids(stream.next(2)) == ["draw-0", "draw-1", "draw-2", "draw-3"]


def test_a_step_takes_groups_that_are_scored_before_those_that_are_not(make: Make) -> None:
    stream, generator = make(Scores(0, 2, 4, 6), apart=True)
    generator.finishing = 8
    stream.begin_step()
    assert uids(stream.next(1)) == ["draw-0", "draw-2", "draw-4", "draw-6"]


def test_on_the_trainers_devices_the_choice_of_groups_does_not_depend_on_how_fast_they_are_scored(make: Make) -> None:
    stream, generator = make(Scores(0, 2, 4, 6))
    generator.finishing = 8
    stream.begin_step()
    assert uids(stream.next(1)) == ["draw-0", "draw-1", "draw-2", "draw-3"]


@pytest.mark.parametrize("apart", [True, False], ids=["engines apart", "one device"])
def test_a_score_that_never_comes_is_named(make: Make, apart: bool) -> None:
    scores = Scores(*range(1, 8))
    stream, generator = make(scores, apart=apart, stall_timeout_s=0.2, max_staleness=0)
    generator.finishing = 8
    stream.begin_step()

    def train() -> None:
        stream.next(1)
        while True:
            stream.watch_scores()

    with pytest.raises(StalledError, match=r"the trainer waits for draw 0 for .*; draw 0 waits for its score"):
        train()


def test_a_resumed_stream_scores_nothing_again_that_was_scored(make: Make) -> None:
    scores = Scores(0, 1, 2, 3, 4)
    stream, generator = make(scores)
    generator.finishing = 8
    stream.begin_step()
    stream.trained(1, uids(stream.next(1)))
    for future in scores.futures["draw-5"]:
        future.set_result(Failure("timeout", "too slow"))
    for future in scores.futures["draw-6"]:
        future.set_result({"score": 0.5, "judge": object()})  # no checkpoint can hold it
    state, carried = stream.state(), stream.carried()

    again = Scores()
    resumed, _ = make(again, folder="resumed")
    resumed.load(state, carried, 1)
    assert set(again.futures) == {"draw-5", "draw-6", "draw-7"}, "what failed may succeed now"
    assert [future.result() for future in resumed.scores.of([4]) or ()] == [{"score": 1.0}] * N


def test_a_resumed_stream_says_of_its_weights_what_they_are(make: Make) -> None:
    """Between two updates the engines have older weights than the trainer; a checkpoint has the trainer's only."""
    settings = {"apart": True, "trigger_parameter_sync_step": 3, "max_staleness": 3}
    stream, generator = make(**settings)
    for step in range(1, 5):
        stream.begin_step()
        stream.trained(step, uids(stream.next(step)))
        stream.update(step, step)
    assert generator.version == 3
    resumed, engines = make(folder="resumed", **settings)
    resumed.load(stream.state(), stream.carried(), 4)
    assert engines.version == 4
    assert resumed.state() == stream.state()


class TwoEngines(Scripted):
    """Each finishes as many of its own as it is asked for."""

    num_engines = 2

    def start(self, request: DataProto, snapshot: DataProto | None) -> None:
        super().start(request, snapshot)
        self.engine_of = dict(zip(uids(request), request.non_tensor_batch["engine"].tolist(), strict=True))

    def advance(self, *, missing: Sequence[int], must_finish: Sequence[str]) -> list[DataProto]:
        done = [
            uid
            for engine, count in enumerate(missing)
            for uid in [uid for uid in self.waiting if self.engine_of[uid] == engine][:count]
        ]
        assert done, f"asked for {missing} groups, the engines have nothing to do and the step would wait for ever"
        self.waiting = [uid for uid in self.waiting if uid not in done]
        return [group(uid, self.version) for uid in done]


def test_a_step_does_not_wait_for_an_engine_that_has_nothing_left(make: Make) -> None:
    """Of the last four groups of a run three were finished at its checkpoint, and one engine is given the fourth."""
    stream, generator = make(max_staleness=20)
    generator.finishing = 7
    stream.begin_step()
    stream.trained(1, uids(stream.next(1)))
    resumed, _ = make(kind=TwoEngines, folder="resumed", max_staleness=20)
    resumed.load(stream.state(), stream.carried(), 8)
    assert len(uids(resumed.next(9))) == GROUPS


def test_weights_that_a_validation_brings_wait_for_running_responses_as_others_do(make: Make, tmp_path: Path) -> None:
    """A validation between two transfers sends the newest weights."""
    stream, generator = make(apart=True, trigger_parameter_sync_step=3, max_staleness=3, partial_rollout=False)
    stream.begin_step()
    stream.trained(1, uids(stream.next(1)))
    stream.update(1, 1)
    assert generator.waiting
    stream.bring_weights(1)
    assert not generator.waiting
    assert generator.version == 1
    stream.begin_step()
    stream.trained(2, uids(stream.next(2)))
    stream.update(2, 2)
    ledger = read_ledger(tmp_path)
    assert ledger is not None
    assert {record.starts[0] for record in ledger.draws.values()} == {0, 1}


def test_a_stream_that_goes_on_from_a_synchronous_run_drops_nothing(make: Make, tmp_path: Path) -> None:
    stream, generator = make(on_stale="drop")
    stream.load(None, {}, 5)
    stream.begin_step()
    stream.trained(6, uids(stream.next(6)))
    assert generator.version == 5
    stream.ledger.flush(6)
    ledger = read_ledger(tmp_path)
    assert ledger is not None
    assert {version for record in ledger.draws.values() for version in record.starts} == {5}
    assert not generator.aborted


def test_a_step_that_is_given_up_keeps_its_scores(make: Make) -> None:
    scores = Scores(0, 1, 2, 3)
    stream, generator = make(scores)
    generator.finishing = 8
    for _ in range(2):
        stream.begin_step()
        given = uids(stream.next(1))
        assert all(future.done() for future in stream.scores.of(map(rollout_stream.draw_number, given)) or [Future()])
        stream.undo_step(0)


@pytest.mark.parametrize(("masks_stale", "kept"), [(False, ["new"]), (True, ["mixed", "new"])])
def test_groups_beyond_the_bound_are_left_out_or_masked(masks_stale: bool, kept: list[str]) -> None:
    groups = {"old": group("old", 1), "mixed": group("mixed", 1), "new": group("new", 2)}
    groups["mixed"].tensors["weight_version"][:, 1] = 2
    left = within_bound(list(groups.values()), 2, masks_stale=masks_stale)
    assert [uids(rows)[0] for rows in left] == kept
    masks = [rows.tensors["response_mask"].unique(dim=0).tolist() for rows in left]
    assert masks == [[[0, 1]], [[1, 1]]][-len(kept) :]


class Writing:
    """Engines that write a token in each poll, and finish nothing for longer than a stall may last."""

    num_restarts = num_polls = 0

    def __init__(self) -> None:
        self.group = self
        self.began = time.monotonic()

    def dp_size(self, mesh: str) -> int:
        return 1

    def submit_groups(self, request: DataProto, snapshot: DataProto | None) -> None:
        self.uids = uids(request)

    def take_groups(self, wait_s: float) -> list[DataProto]:
        time.sleep(0.01)  # a poll that finds nothing lasts
        self.num_polls += 1
        is_over = time.monotonic() - self.began > 2 * STALL_S
        return [group(uid, 0) for uid in self.uids] if is_over else []

    def snapshot_groups(self) -> list[DataProto | None]:
        return [None]

    def num_tokens(self) -> list[int]:
        return [self.num_polls]

    def tool_calls(self) -> list[dict[str, tuple[str, float]]]:
        return [{}]


def test_engines_that_write_do_not_stall_however_short_the_limit(toy: Toy, tmp_path: Path) -> None:
    keys = {"mode": "fully_async", "max_staleness": 0, "stall_timeout_s": STALL_S}
    config = toy.config(tmp_path, {f"async_training.{name}": value for name, value in keys.items()})
    groups: Any = type("Groups", (), {"engines": Writing()})()
    stream = RolloutStream(
        config, groups, DrawLedger(tmp_path), draw_prompts=numbered_prompts(GROUPS, [1]), total_steps=9
    )
    stream.begin_step()
    assert len(uids(stream.next(1))) == GROUPS


class Calls:
    """A group of engines that notes what it is called with; `known` is what they have of unfinished groups."""

    def __init__(self, known: DataProto | None = None) -> None:
        self.known = known
        self.calls: list[tuple[Any, ...]] = []

    def dp_size(self, mesh: str) -> int:
        return 1

    def submit_groups(self, request: DataProto, snapshot: DataProto | None) -> None:
        self.calls.append((uids(request), None if snapshot is None else uids(snapshot)))

    def snapshot_groups(self) -> list[DataProto | None]:
        return [self.known]

    def num_tokens(self) -> list[int]:
        return [0]

    def tool_calls(self) -> list[dict[str, tuple[str, float]]]:
        return [{"draw-0": ("search", 40.0)}]

    def abort_groups(self, names: list[str]) -> None: ...

    def generate_groups(self, request: DataProto | None, *_: Any) -> list[DataProto | None]:
        self.calls.append((None if request is None else uids(request),))
        return []


def named(*names: str) -> DataProto:
    versions = torch.zeros(len(names), 1, dtype=torch.int32)
    return DataProto.from_dict({"weight_version": versions}, {"uid": np.array(names, dtype=object)})


def on_own_devices(known: DataProto | None = None) -> tuple[OnOwnDevices, list[tuple[Any, ...]]]:
    group = Calls(known)
    engines: Any = type("Engines", (), {"group": group, "num_restarts": 0})()
    return OnOwnDevices(engines, 300.0), group.calls


def test_a_tool_that_takes_long_is_named_and_not_its_engine(make: Make) -> None:
    class Searching(Scripted):
        def tool_calls(self) -> dict[str, tuple[str, float]]:
            return {f"draw-{number}": ("search", 0.0) for number in range(GROUPS)}

    stream, generator = make(stall_timeout_s=0.2, kind=Searching)
    generator.finishing, generator.progress = 0, 0.0
    with pytest.raises(StalledError, match=r"the trainer waits for draws 0.*; draw 0 waits for tool search for 0 s\.$"):
        stream.next(1)


def test_how_long_tools_run_is_counted_on_the_drivers_clock() -> None:
    generator, _ = on_own_devices(named("draw-0"))
    generator.snapshot()
    name, began = generator.tool_calls()["draw-0"]
    assert name == "search"
    assert time.monotonic() - began == pytest.approx(40.0, abs=5.0)


def test_engines_are_sent_the_tokens_of_the_draws_that_start_and_of_no_other() -> None:
    generator, calls = on_own_devices(named("draw-0", "draw-1"))
    generator.snapshot()
    generator.start(named("draw-2"), None)
    generator.start(named("draw-1", "draw-2"), None)
    assert calls == [(["draw-2"], None), (["draw-1", "draw-2"], ["draw-1"])]


def test_tokens_of_a_checkpoint_outlive_an_engine_that_dies_before_it_is_asked_for_more() -> None:
    generator, calls = on_own_devices()
    generator.start(named("draw-0"), named("draw-0"))
    generator.start(named("draw-0"), None)  # as after a death
    assert calls == [(["draw-0"], ["draw-0"])] * 2


@pytest.mark.parametrize("noticed_by", ["a wait", "a checkpoint"])
def test_tokens_seen_outlive_engines_that_were_started_again(noticed_by: str) -> None:
    """New engines have no groups until these are started again: asked before, they must not be believed."""
    generator, calls = on_own_devices(named("draw-0"))
    generator.start(named("draw-0"), None)
    generator.snapshot()
    engines: Any = generator._engines
    engines.num_restarts, engines.group.known = 1, None  # as when new weights met a dead engine
    if noticed_by == "a wait":
        generator._snapshot_s = 0.0  # it takes longer to start engines than tokens are left unseen
        engines.group.take_groups = lambda wait_s: [None]
        generator.advance(missing=[1], must_finish=[])
    else:
        kept = generator.snapshot()
        assert kept is not None, "the checkpoint lost what unfinished groups had"
        assert uids(kept) == ["draw-0"]
    assert generator.lost()
    generator.start(named("draw-0"), None)
    assert calls == [(["draw-0"], None), (["draw-0"], ["draw-0"])]


def test_a_draw_that_is_dropped_before_its_turn_is_not_generated() -> None:
    group: Any = Calls()
    generator = OnTrainerDevices(group, max_in_flight=4)
    generator.start(named("draw-0", "draw-1"), None)
    generator.abort(["draw-0"])
    generator.advance(missing=[1], must_finish=[])
    generator.start(named("draw-2"), None)
    generator.abort(["draw-2"])
    generator.advance(missing=[1], must_finish=[])
    assert group.calls == [(["draw-1"],), (None,)]
