"""Estimator, loss, data set and sampler written for verl run here, on Ray too, and give what ours give; engines and
trackers of a user, too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.algorithms import registry
from dovetail.config import ConfigError
from dovetail.config.user_code import UserCodeError
from dovetail.data.build import build_train_loader
from dovetail.data.errors import DataError
from dovetail.models.load import load_tokenizer
from dovetail.trainer.run import run_training
from tests.ranks import run_alone
from tests.trainer import verl_plugins
from tests.trainer.toy_run import Toy, repeatable, train, with_quick_workers

pytestmark = pytest.mark.e2e

NAMES = {
    "algorithm.adv_estimator": "brought_along",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "brought_along",
    "trainer.import_modules": ["brought_algorithm"],
}


@pytest.fixture(autouse=True)
def _separate_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests register is theirs alone."""
    for table in ("_ADVANTAGE_ESTIMATORS", "_POLICY_LOSSES", "_SELECTORS", "_LOSS_COLUMNS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The user's folder, where a run is started."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "brought_algorithm.py").write_text(verl_plugins.ALGORITHM)
    (place / "own_parts.py").write_text(verl_plugins.ENGINE_AND_TRACKER)
    (place / "brought_data.py").write_text(verl_plugins.DATASET)
    (place / "brought_sampler.py").write_text(verl_plugins.SAMPLER)
    return place


def _train_in(
    rank: int, world_size: int, folder: Path, toy: Toy, run: Path, changes: dict[str, Any], use_ray: bool
) -> list[dict[str, Any]]:
    import os

    os.chdir(folder)
    # As the `dovetail` command has it: the folder of the program, not the current one.
    sys.path[:] = [entry for entry in sys.path if entry not in ("", str(folder))]
    os.environ["OMP_NUM_THREADS"] = "1"
    return train(toy.config(run, changes), use_ray=use_ray)[1]


def test_users_estimator_loss_data_set_sampler_engine_tracker_and_callback_train_as_ours_do_on_ray(
    toy: Toy, folder: Path, tmp_path: Path
) -> None:
    """Over 10 s: only workers of Ray show that they import losses and engines from the folder in which the run was
    started. The reward function, the engine and the tracker of the run are not built in either."""
    steps = {"trainer.total_training_steps": 2, "data.shuffle": False}
    brought = {
        "trainer.import_modules": ["brought_algorithm", "own_parts"],
        "actor_rollout_ref.rollout.name": "own",
        "trainer.logger": ["notes"],
        "trainer.save_freq": 2,
        "trainer.on_step": f"{folder}/own_parts.py:stop_at_two",
        "data.custom_cls.path": str(folder / "brought_data.py"),
        "data.custom_cls.name": "BroughtDataset",
        "data.sampler.class_path": str(folder / "brought_sampler.py"),
        "data.sampler.class_name": "BroughtSampler",
    }
    longer = {**NAMES, **brought, **steps, "trainer.total_training_steps": 5}  # the callback ends it
    on_ray = with_quick_workers(longer)
    theirs = run_alone(_train_in, folder, toy, tmp_path / "theirs", on_ray, True, timeout=300.0)
    # A user's loss may read old log-probs, so that its run scores all rows: then `actor/entropy` is over all of them.
    same_rows = {**steps, "actor_rollout_ref.actor.calculate_sum_pi_squared": True}
    ours = run_alone(_train_in, folder, toy, tmp_path / "ours", same_rows, False, timeout=300.0)
    for one, other in zip(repeatable(theirs), repeatable(ours), strict=True):
        shared = {name for name in one if name in other and not name.startswith("global_seqlen")}
        assert {"actor/pg_loss", "actor/grad_norm", "actor/pg_clipfrac", "critic/advantages/max"} <= shared
        for name in shared:
            assert one[name] == pytest.approx(other[name], abs=1e-4, rel=1e-4), name
    assert (tmp_path / "theirs" / "notes.txt").read_text().split("\n") == [
        *("step 1", "checkpoint 2", "step 2", "stopped 2", "end", "")
    ]
    assert (folder / "engine.txt").exists()


def test_an_estimator_whose_column_nothing_writes_is_refused_before_anything_starts(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "wants_a_column.py"
    module.write_text(
        "from dovetail.algorithms import register_adv_est\n\n\n"
        '@register_adv_est("wants_values")\n'
        "def wants_values(token_level_rewards, response_mask, index, values, colour):\n    raise AssertionError\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    keys = {"algorithm.adv_estimator": "wants_values", "trainer.import_modules": ["wants_a_column"]}
    with pytest.raises(ConfigError) as caught:
        run_training(toy.config(tmp_path / "run", keys), use_ray=False)
    message = str(caught.value)
    assert "algorithm.adv_estimator=wants_values asks for values, colour, which no stage of this run writes" in message
    assert "Values is there with critic.enable=True" in message
    assert not (tmp_path / "run").exists()


def test_a_name_that_no_imported_module_registers_is_refused(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registers_nothing.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    keys = {
        "actor_rollout_ref.actor.policy_loss.loss_mode": "vanila",
        "trainer.import_modules": ["registers_nothing"],
    }
    with pytest.raises(ConfigError, match=r"loss_mode=vanila: .*Did you mean vanilla.*registers_nothing"):
        run_training(toy.config(tmp_path / "run", keys), use_ray=False)
    keys["trainer.import_modules"] = ["no_such_module_anywhere"]
    with pytest.raises(UserCodeError, match=r"no_such_module_anywhere cannot be imported .*start the run"):
        run_training(toy.config(tmp_path / "run", keys), use_ray=False)


def loader_of(toy: Toy, tmp_path: Path, folder: Path, name: str) -> Any:
    keys = {"data.sampler.class_path": str(folder / "brought_sampler.py"), "data.sampler.class_name": name}
    return build_train_loader(toy.config(tmp_path, keys), load_tokenizer(str(toy.model)))


def indices(loader: Any, count: int) -> list[list[int]]:
    return [loader.next_batch().non_tensor_batch["index"].tolist() for _ in range(count)]


def test_a_torch_sampler_gives_the_same_order_after_a_resume(toy: Toy, tmp_path: Path, folder: Path) -> None:
    loader = loader_of(toy, tmp_path, folder, "RandomOrder")
    first = indices(loader, 10)  # into the second epoch of 32 prompts
    assert sorted(row for batch in first[:8] for row in batch) == list(range(32))
    assert first[:2] != first[8:]
    state = loader.state_dict()
    rest = indices(loader, 4)
    again = loader_of(toy, tmp_path, folder, "RandomOrder")
    again.load_state_dict(state)
    assert indices(again, 4) == rest
    with pytest.raises(DataError, match="RandomOrder gives another order for epoch 1"):
        loader_of(toy, tmp_path, folder, "RandomOrder").load_state_dict({**state, "order": "another"})


def test_a_curriculum_hears_of_every_step_and_is_resumed(toy: Toy, tmp_path: Path, folder: Path) -> None:
    loader = loader_of(toy, tmp_path, folder, "BroughtSampler")
    assert indices(loader, 1) == [[0, 1, 2, 3]]
    loader.show_batch(loader.next_batch())
    assert loader.state_dict()["sampler"] == {"seen": 4}
    again = loader_of(toy, tmp_path, folder, "BroughtSampler")
    again.load_state_dict(loader.state_dict())
    assert again.state_dict()["sampler"] == {"seen": 4}


def test_a_class_that_is_no_sampler_is_named(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("class Odd:\n    pass\n")
    keys = {"data.sampler.class_path": str(tmp_path / "odd.py"), "data.sampler.class_name": "Odd"}
    with pytest.raises(DataError, match=r"Odd of .*odd.py is no sampler; inherit from torch.utils.data.Sampler"):
        build_train_loader(toy.config(tmp_path, keys), load_tokenizer(str(toy.model)))
