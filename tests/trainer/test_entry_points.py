"""`python -m dovetail.trainer.main_ppo` and `main_dapo` start the loop that the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.root import DovetailConfig
from dovetail.observability.run_folder import RunFolder
from dovetail.trainer import main_dapo, main_ppo
from dovetail.trainer.dapo import RayDAPOTrainer
from dovetail.trainer.run import RunResult, run_training
from tests.trainer.toy_run import DAPO, Toy

pytestmark = pytest.mark.e2e


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: DovetailConfig, **options: Any) -> RunResult:
        return run_training(config, use_ray=False, **options)

    monkeypatch.setattr(main_ppo, "run_ppo", run)


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
