"""Every draw ends once, and the ledger of a run that was killed and resumed says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.observability.ledger import DrawLedger, Ledger, read_ledger, violations
from dovetail.observability.run_folder import DRAWS, RunFolder

pytestmark = pytest.mark.unit


def written(folder: Path, ledger: DrawLedger, step: int = 1) -> Ledger:
    ledger.flush(step)
    read = read_ledger(folder)
    assert read is not None
    return read


def one_step(ledger: DrawLedger, step: int, draws: list[int]) -> None:
    """A synchronous step: all draws start, finish and train under the weights before it."""
    ledger.started(draws, version=step - 1)
    for draw in draws:
        ledger.finished(draw, [[step - 1, 10]])
    ledger.trained(draws, step)
    ledger.flush(step)


def test_each_draw_is_trained_dropped_or_open(tmp_path: Path) -> None:
    ledger = DrawLedger(tmp_path)
    ledger.started(range(4), version=0)
    ledger.finished(0, [[0, 7]])
    ledger.finished(1, [[0, 3], [1, 4]])
    ledger.finished(2, [[0, 5]], restarted=3)
    ledger.trained([0, 1], step=1)
    ledger.dropped(2, "no signal", step=1)
    read = written(tmp_path, ledger)
    assert [read.draws[draw].state for draw in range(4)] == ["trained", "trained", "dropped", "open"]
    assert read.counts() == {"trained": 2, "dropped (no signal)": 1, "open": 1}
    assert read.num_drawn_at == {1: 4}
    assert [read.draws[draw].restarted for draw in range(4)] == [0, 0, 3, 0]


def test_staleness_counts_updates_since_the_oldest_sampled_token(tmp_path: Path) -> None:
    ledger = DrawLedger(tmp_path)
    ledger.started([0, 1, 2], version=2)
    ledger.finished(0, [[2, 5], [3, 1], [5, 9]])
    ledger.finished(1, [[1, 0], [5, 4]])
    ledger.finished(2, [])
    ledger.trained([0, 1, 2], step=6)
    draws = written(tmp_path, ledger, 6).draws
    assert [draws[draw].staleness() for draw in range(3)] == [3, 0, None]
    assert draws[0].staleness(masked_beyond=2) == 2


def test_lines_wait_for_the_flush_of_their_step(tmp_path: Path) -> None:
    ledger = DrawLedger(tmp_path)
    ledger.started([0], version=0)
    assert read_ledger(tmp_path) is None
    ledger.flush(1)
    ledger.started([1], version=1)
    now = read_ledger(tmp_path)
    assert now is not None
    assert list(now.draws) == [0]


def test_a_resume_removes_what_will_happen_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.start()
    ledger = DrawLedger(tmp_path)
    one_step(ledger, 1, [0, 1])
    ledger.started([2, 3], version=1)  # in flight at the checkpoint of step 2
    one_step(ledger, 2, [4, 5])
    before = (tmp_path / DRAWS).read_bytes()
    ledger.finished(2, [[1, 4]])
    ledger.trained([2], step=3)
    ledger.started([6], version=2)
    ledger.flush(3)
    folder.resume(2)
    ledger = DrawLedger(tmp_path)
    ledger.resume(2, num_drawn=6, was_synchronous=False)
    assert (tmp_path / DRAWS).read_bytes() == before
    read = written(tmp_path, ledger, 2)
    assert [draw for draw, record in read.draws.items() if record.state == "open"] == [2, 3]
    one_step(ledger, 3, [6, 7])
    assert not list(violations(written(tmp_path, ledger, 3), bound=0))


def test_a_new_run_in_the_folder_begins_a_new_ledger(tmp_path: Path) -> None:
    RunFolder(tmp_path).start()
    one_step(DrawLedger(tmp_path), 1, [0, 1])
    RunFolder(tmp_path).start()
    assert read_ledger(tmp_path) is None
    assert read_ledger(tmp_path / "previous_1") is not None


def test_a_run_that_resumes_from_another_folder_answers_for_its_own_draws(tmp_path: Path) -> None:
    ledger = DrawLedger(tmp_path)
    ledger.resume(5, num_drawn=40, was_synchronous=False)
    ledger.trained([38], step=6)  # was in flight in the other folder
    one_step(ledger, 6, [40, 41])
    assert not list(violations(written(tmp_path, ledger, 6), bound=0))
    ledger.trained([38], step=7)
    assert list(violations(written(tmp_path, ledger, 7), bound=0)) == [
        "draw 38 ended 2 times: trained at step 6, trained at step 7."
    ]


def test_violations_are_named_one_by_one(tmp_path: Path) -> None:
    ledger = DrawLedger(tmp_path)
    one_step(ledger, 1, [0, 1])
    one_step(ledger, 2, [3, 4])
    ledger.trained([1], step=2)
    ledger.dropped(4, "stale", step=2)
    ledger.trained([7], step=2)
    ledger.started([5, 6], version=1)
    ledger.trained([5], step=3)
    ledger.finished(6, [[0, 2], [2, 1]])
    ledger.finished(6, [[0, 2], [2, 1]])
    ledger.trained([6], step=2)
    assert list(violations(written(tmp_path, ledger, 3), bound=0)) == [
        "draw 2 was skipped: draws up to 6 were started, and it was not.",
        "draw 1 ended 2 times: trained at step 1, trained at step 2.",
        "draw 4 ended 2 times: trained at step 2, dropped (stale).",
        "draw 5 was trained at step 3 and never finished.",
        "draw 6 finished 2 times.",
        "draw 6 was trained at step 2 and has tokens of version 2: weights that did not exist before that step.",
        "draw 6 was trained at step 2 with tokens 1 steps old; the bound is 0.",
        "draw 7 was trained at step 2 and never started.",
        "draw 7 was trained at step 2 and never finished.",
    ]


def test_masked_tokens_do_not_count_against_the_bound(tmp_path: Path) -> None:
    ledger = DrawLedger(tmp_path)
    ledger.started([0, 1], version=0)
    ledger.finished(0, [[0, 5], [4, 5]])
    ledger.finished(1, [[0, 5]])
    ledger.trained([0, 1], step=5)
    read = written(tmp_path, ledger, 5)
    assert list(violations(read, bound=2, masks_stale=True)) == [
        "draw 1 was trained at step 5 and all its tokens are older than 2 steps."
    ]
    assert len(list(violations(read, bound=2))) == 2
    assert not list(violations(read, bound=None))


def test_a_run_that_goes_back_before_its_first_line_begins_its_ledger_anew(tmp_path: Path) -> None:
    """Synchronous steps, an asynchronous one, and then on from a checkpoint of the synchronous part."""
    ledger = DrawLedger(tmp_path)
    ledger.resume(4, num_drawn=16, was_synchronous=False)
    one_step(ledger, 5, [16, 17])
    again = DrawLedger(tmp_path)
    again.resume(2, num_drawn=8, was_synchronous=False)
    RunFolder(tmp_path).resume(2)
    one_step(again, 3, [8, 9])
    read = written(tmp_path, again)
    assert read.elsewhere == [range(8)]
    assert list(violations(read, bound=0)) == []


@pytest.mark.parametrize(("was_synchronous", "num_skipped"), [(True, 0), (False, 2)])
def test_draws_of_synchronous_steps_between_asynchronous_ones_were_not_skipped(
    tmp_path: Path, was_synchronous: bool, num_skipped: int
) -> None:
    """Draws 2 and 3 have no lines; draws from before are still judged."""
    ledger = DrawLedger(tmp_path)
    one_step(ledger, 1, [0, 1])
    ledger.dropped(0, "too old", step=1)
    ledger.flush(1)
    ledger.resume(2, num_drawn=4, was_synchronous=was_synchronous)
    one_step(ledger, 3, [4, 5])
    sentences = list(violations(written(tmp_path, ledger, 3), bound=0))
    assert sum("was skipped" in sentence for sentence in sentences) == num_skipped
    assert "draw 0 ended 2 times: trained at step 1, dropped (too old)." in sentences
