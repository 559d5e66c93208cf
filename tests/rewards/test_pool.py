"""Scoring processes: a bad reward function costs its own row and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.rewards.errors import Failure, RewardError
from dovetail.rewards.functions import FunctionSpec
from dovetail.rewards.pool import KillablePool
from tests.rewards import scoring_functions
from tests.waiting import is_running, wait_until_gone

pytestmark = pytest.mark.unit


def call(answer: str, ground_truth: Any = None) -> dict[str, Any]:
    return {"data_source": "t", "solution_str": answer, "ground_truth": ground_truth, "extra_info": {}}


@pytest.fixture(scope="module")
def pool() -> Iterator[KillablePool]:
    """The limit is for what hangs; a busy machine must have the others done by then."""
    pool = KillablePool([scoring_functions.spec_of(scoring_functions.misbehave)], num_workers=2, timeout_seconds=3.0)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ("sleep", "timeout", "going to sleep"),
        ("segfault", "crash", "SIGSEGV"),
        ("exit", "crash", "exit code 7"),
        ("sys.exit", "exception", "SystemExit: 3"),
        ("raise", "exception", "the judge is unreachable"),
        ("nan", "exception", "the reward is nan"),
        ("inf", "exception", "the reward is inf"),
        ("none", "exception", "NoneType"),
        ("text", "exception", "'1.0', a str"),
        ("lambda", "exception", "cannot be sent"),
    ],
)
def test_a_bad_answer_is_a_failure_with_its_reason(pool: KillablePool, answer: str, kind: str, words: str) -> None:
    outcome = pool.submit(call(answer)).result(60)
    assert isinstance(outcome, Failure)
    assert outcome.kind == kind
    assert words in outcome.detail


def test_good_answers_are_scored_while_others_hang_and_die(pool: KillablePool) -> None:
    answers = ["good", "sleep", "good", "exit", "good", "raise", "good"]
    outcomes = [future.result(60) for future in [pool.submit(call(answer)) for answer in answers]]
    scored = [outcome == {"score": 0.5} for outcome in outcomes]
    assert scored == [answer == "good" for answer in answers]


def test_a_timeout_also_kills_what_the_function_started(pool: KillablePool, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    assert pool.submit(call("spawn", str(note))).result(60).kind == "timeout"
    pid = int(note.read_text())
    wait_until_gone(pid)


def test_a_worker_killed_from_outside_is_replaced() -> None:
    pool = KillablePool([scoring_functions.spec_of(scoring_functions.length)], num_workers=1, timeout_seconds=30)
    try:
        os.kill(pool.pids()[0], signal.SIGKILL)
        outcomes = [pool.submit(call("four")).result(30) for _ in range(3)]
        assert [outcome for outcome in outcomes if not isinstance(outcome, Failure)][-1] == {"score": 4.0}
    finally:
        pool.close()


def test_a_process_that_is_stopped_in_the_middle_of_a_message_costs_its_row_and_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dovetail.rewards.pool.MESSAGE_SECONDS", 1)
    pool = KillablePool([scoring_functions.spec_of(scoring_functions.length)], num_workers=1, timeout_seconds=2.0)
    try:
        os.kill(pool.pids()[0], signal.SIGSTOP)
        outcomes = [pool.submit(call(answer)).result(60) for answer in ("long" * (1 << 20), "four")]
        assert outcomes[0].kind == "timeout"
        assert outcomes[1] == {"score": 4.0}
    finally:
        pool.close()


def test_a_process_that_cannot_be_replaced_fails_its_calls_and_hangs_none(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("import os\ndef f(data_source, solution_str, ground_truth, extra_info):\n    os._exit(1)\n")
    pool = KillablePool([FunctionSpec(str(file), "f")], num_workers=1, timeout_seconds=30)
    try:
        file.unlink()
        outcomes = [future.result(60) for future in [pool.submit(call("a")) for _ in range(3)]]
        assert "exit code 1" in outcomes[0].detail
        assert all("could not start" in outcome.detail for outcome in outcomes[1:])
    finally:
        pool.close()


def test_closing_ends_every_process_and_every_future() -> None:
    pool = KillablePool([scoring_functions.spec_of(scoring_functions.misbehave)], num_workers=1, timeout_seconds=100)
    pids = pool.pids()
    futures = [pool.submit(call("sleep")) for _ in range(3)]
    pool.close()
    assert all(isinstance(future.result(1), Failure) for future in futures)
    assert not any(is_running(pid) for pid in pids)
    with pytest.raises(RewardError, match="stopped"):
        pool.submit(call("good"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (FunctionSpec("no_such_file.py", "compute_score"), "there is no file"),
        (FunctionSpec("pkg://tests.rewards.scoring_functions", "lenght"), "Did you mean length"),
        (FunctionSpec("pkg://no_such_package.rewards", "f"), "cannot be imported"),
        (FunctionSpec("pkg://tests.rewards.scoring_functions", "wrong_signature"), "takes \\(data_source"),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_at_the_start(spec: FunctionSpec, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        KillablePool([spec], num_workers=1, timeout_seconds=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [("import no_such_library", "No module named 'no_such_library'"), ("exit(2)", "line 1: SystemExit: 2")],
)
def test_a_file_that_fails_while_imported_is_an_error_at_the_start(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "reward.py"
    file.write_text(f"{text}\n")
    with pytest.raises(RewardError, match=words):
        KillablePool([FunctionSpec(str(file), "compute_score")], num_workers=1, timeout_seconds=1)


def test_the_processes_die_with_a_driver_that_is_killed() -> None:
    program = (
        "import threading\n"
        "from dovetail.rewards.functions import FunctionSpec\n"
        "from dovetail.rewards.pool import KillablePool\n"
        "spec = FunctionSpec('pkg://tests.rewards.scoring_functions', 'misbehave')\n"
        "pool = KillablePool([spec], num_workers=2, timeout_seconds=3600)\n"
        "pool.submit({'data_source': '', 'solution_str': 'sleep', 'ground_truth': None, 'extra_info': None})\n"
        "print(*pool.pids(), flush=True)\n"
        "threading.Event().wait()\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    driver.kill()
    driver.wait()
    assert len(pids) == 2
    wait_until_gone(*pids)
