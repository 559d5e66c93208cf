"""A run whose model, critic and data are names on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.cli.main import main
from dovetail.models.load import load_tokenizer
from tests.hub import put_in_cache
from tests.trainer.toy_run import Toy, repeatable, train

pytestmark = pytest.mark.e2e


def test_a_run_from_names_on_the_hub_equals_one_from_folders(toy: Toy, tmp_path: Path, cache: Path) -> None:
    """PPO with a critic: policy, reference, critic, tokenizer and prompts all come through the hub's cache."""
    put_in_cache(cache, "org/tiny", toy.model)
    put_in_cache(cache, "org/words", toy.data, kind="dataset")
    changes = {"algorithm.adv_estimator": "gae", "trainer.total_training_steps": 1}
    _, plain = train(toy.config(tmp_path / "plain", changes))
    named = {"actor_rollout_ref.model.path": "org/tiny", "data.train_files": "hf://datasets/org/words/train.parquet"}
    result, metrics = train(toy.config(tmp_path / "named", changes | named))
    assert repeatable(metrics) == repeatable(plain)
    assert "org/tiny" in (result.folder / "config.yaml").read_text()


def test_a_name_that_cannot_be_had_ends_the_run_before_it_begins(
    toy: Toy, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_cache(cache, "org/tiny", toy.model)
    changes = {"actor_rollout_ref.model.path": "org/tiny", "algorithm.adv_estimator": "gae"}
    arguments = toy.arguments(tmp_path / "run", changes | {"critic.model.path": "org/absent"})
    assert main(["train", "--local", *arguments]) == 2
    shown = capsys.readouterr().err
    assert "critic.model.path=org/absent" in shown
    assert str(cache / "models--org--absent") in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_of_the_hub_is_read(toy: Toy, cache: Path) -> None:
    put_in_cache(cache, "org/tiny", toy.model)
    assert load_tokenizer("org/tiny").get_vocab() == load_tokenizer(toy.model).get_vocab()
