"""Work that is done beside other tests must reach the tests that ask for it, failures too."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ahead import ahead, in_order_of_waiting, starting
from tests.patience import patience
from tests.ranks import run_alone

pytestmark = pytest.mark.unit

HERE = sys.modules[__name__]
GO_ON = threading.Event()


@ahead
def waiting(folder: Path) -> str:
    assert GO_ON.wait(60)
    return folder.name


@ahead
def failing(folder: Path) -> None:
    raise ValueError("broken on purpose")


@ahead
def doubled(folder: Path, number: int) -> int:
    return 2 * number


@ahead
def patient(folder: Path) -> float:
    return patience(100.0)


@ahead
def niceness(folder: Path) -> list[int]:
    program = [sys.executable, "-c", "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"]
    return [run_alone(_niceness), int(subprocess.run(program, capture_output=True, check=True).stdout)]


def _niceness(rank: int, world_size: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def item(*fixtures: str, **parameters: Any) -> Any:
    return _item(HERE, fixtures, parameters)


def _item(module: Any, fixtures: tuple[str, ...], parameters: dict[str, Any], *marks: str) -> Any:
    return SimpleNamespace(
        module=module,
        fixturenames=fixtures,
        callspec=SimpleNamespace(params=parameters),
        get_closest_marker=lambda name: name if name in marks else None,
    )


def test_only_what_is_asked_for_is_started_and_once() -> None:
    folders: list[str] = []

    def new_folder(name: str) -> Path:
        folders.append(name)
        return Path(name)

    GO_ON.clear()
    with starting([item("tmp_path"), item("waiting"), item("waiting", "doubled", number=3)], new_folder) as started:
        assert folders == ["waiting", "doubled"]
        found = started[__name__, "doubled", ("3",)]
        assert found.result(60) == 6, "pieces do not wait for each other"
        assert not started[__name__, "waiting", ()].done()
        GO_ON.set()
        assert started[__name__, "waiting", ()].result(60) == "waiting"


def test_a_failure_is_raised_where_the_work_is_asked_for() -> None:
    with starting([item("failing")], Path) as started, pytest.raises(ValueError, match="broken on purpose"):
        started[__name__, "failing", ()].result(60)


def test_what_has_not_begun_at_the_end_is_given_up() -> None:
    GO_ON.clear()
    asked = [item("doubled", number=number) for number in range(3)]
    threading.Timer(0.1, GO_ON.set).start()
    with starting([item("waiting"), *asked], Path) as started:
        pass
    assert all(found.done() for found in started.values())


def test_processes_of_work_done_ahead_stand_back_behind_those_of_tests(niceness: list[int]) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness == [min(own + 5, 19)] * 2
    assert run_alone(_niceness) == own


def test_modules_that_wait_come_late_and_quiet_ones_last_all_whole_and_in_order() -> None:
    waiting = [item("tmp_path"), item("waiting"), item(), item("doubled", number=1)]
    other, alone = SimpleNamespace(__name__="other"), SimpleNamespace(__name__="alone")
    others = [_item(other, fixtures, {}) for fixtures in (("waiting",), ())]
    quiet = [_item(alone, (), {}, "quiet") for _ in range(2)]
    mixed = [quiet[0], waiting[0], others[0], waiting[1], others[1], quiet[1], *waiting[2:]]
    assert in_order_of_waiting(mixed) == [*others, *waiting, *quiet]


@pytest.mark.parametrize("number", [1, 2])
def test_each_value_of_a_parameter_is_a_piece_of_its_own(doubled: Any, number: int) -> None:
    assert doubled.result(60) == 2 * number


def test_work_that_stands_back_may_take_longer(tmp_path: Path) -> None:
    if os.getpriority(os.PRIO_PROCESS, 0) <= 0:
        assert patience(100.0) == 100.0
    with starting([item("patient")], lambda name: tmp_path) as started:
        assert started[(__name__, "patient", ())].result() == 300.0
