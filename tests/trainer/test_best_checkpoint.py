"""`trainer.save_best`: a better validation is saved, and the best checkpoint outlives the others, and a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.checkpoint.manifest import read_manifest
from dovetail.checkpoint.store import CheckpointStore
from dovetail.cli.main import main
from dovetail.config import ConfigError
from tests.trainer.test_export import logits
from tests.trainer.toy_run import Toy, train

pytestmark = pytest.mark.e2e

METRIC = "val-core/toy/reward/mean@1"
STEPS = 6


def keys(toy: Toy, **changes: Any) -> dict[str, Any]:
    """The smallest reward is the best here: it rises, so that the best checkpoint is not the last one."""
    settings = {
        "test_freq": 1, "save_best": METRIC, "save_best_mode": "min", "total_training_steps": STEPS, **changes,
    }  # fmt: skip
    return {"data.val_files": str(toy.data / "val.parquet")} | {f"trainer.{key}": v for key, v in settings.items()}


@pytest.fixture(scope="module")
def values(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run that saves nothing else, and the metric of its steps."""
    folder = tmp_path_factory.mktemp("best") / "run"
    _, rows = train(toy.config(folder, keys(toy)))
    return folder, [row[METRIC] for row in rows]


def test_a_checkpoint_is_saved_whenever_a_validation_is_better_than_all_before(
    values: tuple[Path, list[float]],
) -> None:
    folder, found = values
    improved = [step for step in range(1, STEPS + 1) if found[step - 1] < min([*found[: step - 1], 9.0])]
    store = CheckpointStore(folder)
    assert store.steps() == improved
    assert 0 < len(improved) < STEPS
    assert store.best() == dovetail.Run(folder).best_checkpoint == store.folder(improved[-1])
    entry = {"metric": METRIC, "value": min(found), "mode": "min"}
    assert read_manifest(store.folder(improved[-1])).extra == {"score": entry}


@pytest.mark.parametrize("background", [False, True])
def test_the_best_checkpoint_is_kept_beside_the_newest_also_by_a_run_that_is_continued(
    toy: Toy, tmp_path: Path, values: tuple[Path, list[float]], background: bool
) -> None:
    best = values[1].index(min(values[1])) + 1
    saving = {"save_freq": 1, "max_actor_ckpt_to_keep": 1}
    more = {"actor_rollout_ref.actor.checkpoint.async_save": background}
    train(toy.config(tmp_path, {**keys(toy, **saving, total_training_steps=best), **more}))
    for stop in (min(best + 1, STEPS), STEPS):
        _, rows = train(toy.config(tmp_path, {**keys(toy, **saving, total_training_steps=stop), **more}))
        assert CheckpointStore(tmp_path).steps() == sorted({best, stop})
    assert [row[METRIC] for row in rows] == values[1]


def test_export_eval_and_generate_take_the_best_and_the_list_marks_it(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saving, said = {"save_freq": 1, "total_training_steps": 3}, []
    train(toy.config(tmp_path / "run", keys(toy, **saving)))
    store = CheckpointStore(tmp_path / "run")
    best = store.best()
    assert best is not None
    assert main(["export", str(tmp_path / "run"), "--list"]) == 0
    marked = [line for line in capsys.readouterr().out.splitlines() if "(best)" in line]
    assert len(marked) == 1
    assert f"{best}  {METRIC} " in marked[0]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "best"), "--best"]) == 0
    assert main(["export", str(best), str(tmp_path / "same")]) == 0
    assert torch.equal(logits(tmp_path / "best"), logits(tmp_path / "same"))
    assert main(["eval", str(tmp_path / "run"), "--best", "--out", str(tmp_path / "eval")]) == 0
    assert json.loads((tmp_path / "eval" / "eval.json").read_text())["model"] == str(best)
    capsys.readouterr()
    for given in ([str(tmp_path / "run"), "--best"], [str(best)]):
        assert main(["generate", *given, "1 + 2", "-n", "3"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert main(["export", str(best), str(tmp_path / "twice"), "--best"]) == 2
    assert "is one checkpoint" in capsys.readouterr().err
    train(toy.config(tmp_path / "plain", {"trainer.save_freq": 3}))
    assert main(["export", str(tmp_path / "plain"), str(tmp_path / "none"), "--best"]) == 2
    assert "none was validated with trainer.save_best" in capsys.readouterr().err


def test_a_metric_that_the_first_validation_does_not_report_ends_the_run_with_its_names(
    toy: Toy, tmp_path: Path
) -> None:
    wrong = keys(toy, save_best="val-core/toy/reward/mean@4", val_before_train=True)
    with pytest.raises(ConfigError, match=r"mean@4 is no metric of the validation; did you mean val-core/toy/reward/"):
        train(toy.config(tmp_path, wrong))
