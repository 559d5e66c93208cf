"""Scoring from token ids: text is made in the scoring processes, a hopeless batch is given up, limits are kept."""

from __future__ import annotations

import asyncio
import pickle
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.config import DovetailConfig
from dovetail.protocol import DataProto
from dovetail.rewards.build import build_reward_runner
from dovetail.rewards.decoding import TokenIds, decoder_source
from dovetail.rewards.dispatch import RateLimiter, RateLimits, ScoringDispatcher
from dovetail.rewards.errors import Failure, RewardError
from dovetail.rewards.functions import FunctionSpec
from dovetail.rewards.managers import NaiveRewardManager
from dovetail.rewards.nodes import NodePool
from dovetail.rewards.runner import RewardRunner
from dovetail.rewards.worker_process import _no_decoder, _reply, _score_one
from tests.models.tiny import tiny_tokenizer
from tests.rewards.test_runner import answers
from tests.waiting import wait_until

pytestmark = pytest.mark.unit

FUNCTIONS = """
import asyncio, os, time

def _note():
    open(os.path.join(os.path.dirname(__file__), "calls"), "a").write("x")

def quotes(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str), "seen": solution_str}

def hangs(data_source, solution_str, ground_truth, extra_info):
    _note()
    if solution_str != "good":
        time.sleep(3600)
    return 1.0

async def judge(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    if solution_str == "raise":
        raise ConnectionError("no judge there")
    if solution_str == "hang":
        await asyncio.Event().wait()
    return 1.0

def asks_in_a_loop(data_source, solution_str, ground_truth, extra_info):
    return asyncio.get_event_loop().run_until_complete(judge(data_source, solution_str, ground_truth, extra_info))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(FUNCTIONS)
    return path


def runner(file: Path, name: str, **options: Any) -> RewardRunner:
    return RewardRunner([FunctionSpec(str(file), name)], tiny_tokenizer(), **{"timeout_seconds": 1.0, **options})


class Shouting:
    """A tokenizer that only this class can decode."""

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        return ["!" * len(ids) for ids in sequences]


def test_scoring_processes_decode_and_send_the_text_back(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["abc", "", "x y", "good"]
    batch = answers(*texts)
    tokenizer = tiny_tokenizer()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("decoded in the driver")

    monkeypatch.setattr(tokenizer, "batch_decode", refuse)
    with RewardRunner([FunctionSpec(str(file), "quotes")], tokenizer, timeout_seconds=30.0) as reward:
        result = reward.score(batch)
    assert result.columns.non_tensor_batch["seen"].tolist() == texts
    assert result.columns.non_tensor_batch["response_str"].tolist() == texts
    assert result.solution_strs == texts
    assert result.columns.tensors["token_level_scores"].sum(-1).tolist() == [3.0, 0.0, 3.0, 4.0]


def test_text_and_scores_are_those_of_decoding_in_the_driver(file: Path) -> None:
    class Reads(NaiveRewardManager):
        def prepare(self, answer: Any) -> dict[str, Any]:
            return super().prepare(answer)

    batch = answers("abc", "\\boxed{7}", "good \u00e9", "")
    with runner(file, "quotes", timeout_seconds=30.0) as there, runner(file, "quotes", manager=Reads()) as here:
        ours, theirs = there.score(batch), here.score(batch)
    assert "response_str" not in theirs.columns
    ours.columns.pop(non_tensor_batch_keys=["response_str"])
    assert ours.columns.equals(theirs.columns)
    assert ours.solution_strs == theirs.solution_strs


def test_rows_that_were_scored_before_their_batch_was_there_give_the_same(file: Path) -> None:
    texts = ["abc", "good", "x y", ""]
    batch = answers(*texts)
    with runner(file, "quotes", timeout_seconds=30.0) as reward:
        expected = reward.score(batch)
        late = reward.start(batch.select_idxs([2, 3]))
        started = [*reward.start(batch.select_idxs([0, 1])), *late]
        pending = reward.submit(batch, started=started)
        results = [pending.result(), reward.submit(batch, started=started).result(), pending.result(lambda: None)]
    for result in results:
        assert result.columns.equals(expected.columns)
        assert result.metrics == expected.metrics
        assert result.solution_strs == texts


def test_a_plain_function_has_a_current_event_loop(file: Path) -> None:
    with runner(file, "asks_in_a_loop", timeout_seconds=30.0) as reward:
        assert reward.score(answers("a", "b")).columns.tensors["token_level_scores"].sum(-1).tolist() == [1.0, 1.0]


def test_a_plain_function_that_imports_asyncio_in_its_body_has_a_current_event_loop(tmp_path: Path) -> None:
    """Python before 3.14 makes one by itself."""
    file = tmp_path / "late.py"
    file.write_text(
        "def late(data_source, solution_str, ground_truth, extra_info):\n"
        "    import asyncio\n"
        "    return asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, 1.0))\n"
    )
    with runner(file, "late", timeout_seconds=30.0) as reward:
        assert reward.score(answers("a", "b")).columns.tensors["token_level_scores"].sum(-1).tolist() == [1.0, 1.0]


def test_who_waits_for_scores_is_asked_meanwhile_and_may_give_up(file: Path) -> None:
    def give_up() -> None:
        raise TimeoutError("no score")

    with runner(file, "judge", timeout_seconds=30.0) as reward:
        pending = reward.submit(answers("hang"))
        with pytest.raises(TimeoutError, match="no score"):
            pending.result(give_up)


def test_a_tokenizer_of_its_own_kind_travels_whole() -> None:
    fast = decoder_source(tiny_tokenizer())
    assert fast is not None
    assert fast.definition is not None
    own = decoder_source(Shouting())
    assert own is not None
    assert own.definition is None
    ids = TokenIds(bytes(4 * 3))
    assert pickle.loads(pickle.dumps(own)).load()(ids) == "!!!"
    unsendable = Shouting()
    unsendable.lock = threading.Lock()  # type: ignore[attr-defined]
    assert decoder_source(unsendable) is None


def test_an_async_reward_that_raises_and_one_that_hangs_cost_their_rows_alone(file: Path) -> None:
    with runner(file, "judge", num_workers=2, max_failed_share=0.5) as reward:
        result = reward.score(answers("good", "raise", "hang", "good"))
    assert result.columns.tensors["reward_failed"].tolist() == [False, True, True, False]
    assert result.failures[1].kind == "exception"
    assert "no judge there" in result.failures[1].detail
    assert result.failures[2].kind == "timeout"


def calls_of(file: Path) -> int:
    return len((file.parent / "calls").read_text())


def test_a_batch_is_given_up_as_soon_as_too_many_rows_have_failed(file: Path) -> None:
    with runner(file, "hangs") as reward:
        with pytest.raises(RewardError, match=r"of 8 responses could not be scored \(2 timeout; given up after 2\)"):
            reward.score(answers(*["bad"] * 8))
        assert calls_of(file) <= 4  # the third may have started before the second was judged
        # What was given up is gone: the processes are free for the next batch.
        assert reward.score(answers("good", "good")).columns.tensors["token_level_scores"].sum() == 2


def test_a_function_that_always_hangs_is_found_out_before_the_share_is_reached(file: Path) -> None:
    """0.2 of 64 rows are 12; a run would wait for 13 time limits."""
    with (
        runner(file, "hangs") as reward,
        pytest.raises(RewardError, match="given up after 4, none of which was scored"),
    ):
        reward.score(answers(*["bad"] * 64))
    assert calls_of(file) <= 6


def test_a_prompt_whose_answers_all_hang_is_not_taken_for_that(file: Path) -> None:
    batch = answers(*["bad"] * 5, *["good"] * 25)
    batch.union(DataProto.from_dict(non_tensors={"uid": ["hard"] * 5 + [f"easy {i // 5}" for i in range(25)]}))
    with runner(file, "hangs", num_workers=2) as reward:
        failed = reward.score(batch).columns.tensors["reward_failed"]
    assert failed.tolist() == [True] * 5 + [False] * 25


# ---- limits ----


def test_calls_per_minute_are_those_of_the_tighter_limit() -> None:
    assert RateLimits(max_rpm=60, max_tpm=20_000, estimated_tokens=2000).calls_per_minute == 10
    assert RateLimits(max_rpm=5, max_tpm=20_000, estimated_tokens=2000).calls_per_minute == 5
    assert RateLimits(max_concurrent=3).calls_per_minute is None
    with pytest.raises(ValueError, match="no call could ever start"):
        RateLimits(max_tpm=100, estimated_tokens=2000)


def test_the_limiter_waits_for_a_minute_to_pass_or_a_call_to_end() -> None:
    limiter = RateLimiter(RateLimits(max_concurrent=2, max_rpm=3))
    for now in (0.0, 1.0):
        assert limiter.wait(now) == 0
        limiter.start(now)
    assert limiter.wait(2.0) is None
    limiter.end()
    assert limiter.wait(2.0) == 0
    limiter.start(2.0)
    limiter.end()
    assert limiter.wait(10.0) == 50.0
    assert limiter.wait(60.0) == 0


class FakePool:
    """Calls end when the test says so."""

    def __init__(self) -> None:
        self.running: list[tuple[bytes, Future[Any]]] = []
        self.most = 0
        self.closed = threading.Event()

    def submit_message(self, message: bytes) -> Future[Any]:
        future: Future[Any] = Future()
        self.running.append((message, future))
        self.most = max(self.most, sum(not f.done() for _, f in self.running))
        return future

    def cancel(self, futures: Any) -> None:
        for future in futures:
            future.set_result(Failure("cancelled", ""))

    def close(self) -> None:
        self.closed.set()

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.running) >= count, f"{count} calls")


def test_no_more_calls_run_than_max_concurrent_allows() -> None:
    pool = FakePool()
    dispatcher = ScoringDispatcher(pool, num_workers=8, timeout_seconds=1, limits=RateLimits(max_concurrent=2))
    futures = [dispatcher.submit({"row": row}) for row in range(6)]
    for row in range(6):
        pool.wait_for(row + 1)
        pool.running[row][1].set_result({"score": row})
    assert [future.result(30)["score"] for future in futures] == list(range(6))
    assert pool.most <= 2
    dispatcher.close()


def test_a_call_that_cannot_start_while_another_ends_leaves_both_of_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each thread counts its end with the lock held, so neither count is lost."""
    locked: list[bool] = []

    def end(limiter: RateLimiter) -> None:
        try:
            dispatcher._changed.notify(0)  # only a thread that holds the lock may
        except RuntimeError:
            locked.append(False)
        else:
            locked.append(True)
        limiter.num_running -= 1

    class RefusesTheSecond(FakePool):
        def submit_message(self, message: bytes) -> Future[Any]:
            if pickle.loads(message)["row"] == 1:
                threading.Thread(target=self.running[0][1].set_result, args=({"score": 0},)).start()
                raise OSError("no process")
            return super().submit_message(message)

    monkeypatch.setattr(RateLimiter, "end", end)
    pool = RefusesTheSecond()
    dispatcher = ScoringDispatcher(pool, num_workers=8, timeout_seconds=1, limits=RateLimits(max_concurrent=2))
    first, refused = (dispatcher.submit({"row": row}) for row in range(2))
    assert first.result(30) == {"score": 0}
    assert isinstance(refused.result(30), Failure)
    assert locked == [True, True]
    futures = [dispatcher.submit({"row": row}) for row in (2, 3)]
    pool.wait_for(3)  # these two run side by side
    for _, future in pool.running[1:]:
        future.set_result({"score": 1})
    assert [future.result(30) for future in futures] == [{"score": 1}] * 2
    dispatcher.close()


def test_a_call_that_is_cancelled_while_it_starts_does_not_go_on() -> None:
    class CancelledAsItStarts(FakePool):
        def submit_message(self, message: bytes) -> Future[Any]:
            dispatcher.cancel([submitted.result(30)])
            return super().submit_message(message)

    pool, submitted = CancelledAsItStarts(), Future[Future[Any]]()
    dispatcher = ScoringDispatcher(pool, num_workers=1, timeout_seconds=1)
    submitted.set_result(dispatcher.submit({"row": 0}))
    assert submitted.result().result(30).kind == "cancelled"
    pool.wait_for(1)
    assert pool.running[0][1].result(30).kind == "cancelled"
    dispatcher.close()


def test_a_call_of_another_node_may_end_while_it_is_cancelled() -> None:
    class Ends(Future[Any]):
        num_looks = 0

        def __hash__(self) -> int:
            self.num_looks += 1
            if self.num_looks == 3:  # the first was `submit_message`'s
                self.set_result(None)
            return id(self)

    call, cancelled = Ends(), []
    score, cancel = (SimpleNamespace(remote=remote) for remote in (lambda *_: asked, cancelled.append))
    asked = SimpleNamespace(future=lambda: call)
    pool = NodePool("b", SimpleNamespace(score=score, cancel=cancel), 1)
    assert pool.submit_message(b"") is call
    pool.cancel([call])
    assert cancelled == [[1]]


def test_calls_of_a_node_that_is_lost_are_scored_by_the_others() -> None:
    here, there = FakePool(), FakePool()
    dispatcher = ScoringDispatcher(here, num_workers=1, timeout_seconds=1)
    dispatcher.add("node b", there, 3)
    futures = [dispatcher.submit({"row": row}) for row in range(6)]
    there.wait_for(4)
    there.running[0][1].set_exception(ConnectionError("the node is gone"))
    assert there.closed.wait(30)
    assert dispatcher.calls_at_a_time == 1
    _score_all(here, futures)
    dispatcher.close()


def test_cancelled_calls_of_a_node_that_is_lost_are_not_scored_again() -> None:
    class Deaf(FakePool):
        def cancel(self, futures: Any) -> None: ...

    here, there = FakePool(), Deaf()
    dispatcher = ScoringDispatcher(here, num_workers=1, timeout_seconds=1)
    dispatcher.add("node b", there, 3)
    futures = [dispatcher.submit({"row": row}) for row in range(6)]
    here.wait_for(2)
    there.wait_for(4)
    dispatcher.cancel(futures)
    there.running[0][1].set_exception(ConnectionError("the node is gone"))
    last = dispatcher.submit({"row": "last"})
    here.wait_for(3)
    message, future = here.running[2]
    assert pickle.loads(message)["row"] == "last"
    future.set_result({"score": 1})
    assert last.result(30) == {"score": 1}
    assert {future.result(30).kind for future in futures} == {"cancelled"}
    dispatcher.close()


def _score_all(pool: FakePool, futures: list[Future[Any]]) -> None:
    for row in range(len(futures)):
        pool.wait_for(row + 1)
        message, future = pool.running[row]
        future.set_result({"score": pickle.loads(message)["row"]})
    assert [future.result(30)["score"] for future in futures] == list(range(len(futures)))


def test_a_node_that_takes_no_call_loses_none() -> None:
    class Refusing(FakePool):
        def submit_message(self, message: bytes) -> Any:
            raise OSError("no route")

    here = FakePool()
    dispatcher = ScoringDispatcher(here, num_workers=1, timeout_seconds=1)
    dispatcher.add("node b", Refusing(), 3)
    futures = [dispatcher.submit({"row": row}) for row in range(6)]
    _score_all(here, futures)
    assert dispatcher.calls_at_a_time == 1
    dispatcher.close()


def test_rate_limits_come_from_the_names_that_verl_has(file: Path) -> None:
    section = {"reward_manager": "rate_limited", "max_concurrent": 1, "max_rpm": 600, "timeout": 30.0}
    config = DovetailConfig(
        reward_model={**section, "max_tpm": 10**6, "estimated_tokens_per_request": 100},
        custom_reward_function={"path": str(file), "name": "quotes"},
    )
    with build_reward_runner(config, tiny_tokenizer()) as reward:
        assert reward.score(answers("abc", "ab")).columns.tensors["token_level_scores"].sum(-1).tolist() == [3, 2]
    impossible = DovetailConfig(reward_model={**section, "max_tpm": 10, "estimated_tokens_per_request": 100})
    with pytest.raises(RewardError, match="estimated_tokens_per_request=100 is more than"):
        build_reward_runner(impossible, tiny_tokenizer())


def test_a_value_that_is_no_score_is_said_in_one_line_and_an_error_with_the_users_lines_alone() -> None:
    def users(**_: Any) -> Any:
        raise KeyError("level")

    def reply(function: Any) -> str:
        spec, loop = FunctionSpec("f.py", "f"), asyncio.new_event_loop()
        return _reply(partial(_score_one, [function], [spec], loop=loop), {}, _no_decoder)[1]

    assert reply(lambda: None) == "the reward is None, a NoneType; return a number or a dict with 'score'.\n"
    said = reply(users)
    assert said.endswith("KeyError: 'level'\n")
    assert "worker_process" not in said
