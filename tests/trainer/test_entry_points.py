"""`python -m dovetail.trainer.main_*` start the loop and the mode they are named after, and end with its exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dovetail.cli.main import main as command
from dovetail.config.root import DovetailConfig
from dovetail.observability.run_folder import RunFolder
from dovetail.observability.stalls import STALLED_EXIT_CODE, StalledError
from dovetail.trainer import main_dapo, main_fully_async, main_one_step_off, main_ppo, run
from dovetail.trainer.dapo import RayDAPOTrainer
from dovetail.trainer.run import RunResult, run_training
from tests.trainer.toy_run import DAPO, Toy

pytestmark = pytest.mark.e2e


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_ppo, "run_ppo", partial(run_training, use_ray=False))


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("main", [main_ppo.main, main_dapo.main], ids=["main_ppo", "main_dapo"])
@pytest.mark.parametrize("filters", [True, False])
def test_groups_are_filtered_where_the_configuration_says_so(
    toy: Toy, tmp_path: Path, main: Callable[[list[str]], int], filters: bool
) -> None:
    changes = DAPO | {"trainer.total_training_steps": 1} if filters else {"trainer.total_training_steps": 1}
    assert main(toy.arguments(tmp_path / "run", changes)) == 0
    (row,) = RunFolder(tmp_path / "run").read_metrics()
    assert ("train/num_gen_batches" in row) == filters
    answers = (tmp_path / "run" / "rollouts" / "step_1.jsonl").read_text().splitlines()
    assert len(answers) == 4 * 4, "data.train_batch_size x rollout.n, whatever data.gen_batch_size is"


def test_main_dapo_names_its_own_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(config: DovetailConfig, *, trainer_class: Any) -> RunResult:
        asked.append(trainer_class)
        return RunResult(Path("run"), 0, {})

    monkeypatch.setattr(main_ppo, "run_ppo", run)
    assert main_dapo.main([]) == main_ppo.main([]) == 0
    assert asked == [RayDAPOTrainer, None]


def test_run_ppo_is_the_function_behind_every_entry() -> None:
    assert main_ppo.run_ppo is run_training


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
