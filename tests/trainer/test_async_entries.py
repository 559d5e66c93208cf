"""The entry modules of asynchronous training choose the mode; a stalled run has an exit code of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import pytest

from dovetail.cli.main import main as command
from dovetail.observability.stalls import STALLED_EXIT_CODE, StalledError
from dovetail.trainer import main_fully_async, main_one_step_off, main_ppo, run

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("main", "mode"), [(main_one_step_off.main, "one_step_off"), (main_fully_async.main, "fully_async")]
)
def test_the_module_sets_the_mode(
    main: Callable[[Sequence[str]], int], mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["algorithm.adv_estimator=remax"]) == 2
    assert f"async_training.mode={mode} takes groups as they come" in capsys.readouterr().err
    assert main(["async_training.mode=off", "algorithm.adv_estimator=remax"]) == 2
    assert "takes groups as they come" not in capsys.readouterr().err


def test_a_stall_is_said_in_one_line_with_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stall(*args: object, **kwargs: object) -> NoReturn:
        raise StalledError("no progress for 300 s: trainer waits for draw 3 for 300 s.")

    monkeypatch.setattr(main_ppo, "run_ppo", stall)
    monkeypatch.setattr(run, "run_training", stall)
    assert main_ppo.main([]) == STALLED_EXIT_CODE
    assert command(["train"]) == STALLED_EXIT_CODE
    assert capsys.readouterr().err.count("trainer waits for draw 3") == 2
