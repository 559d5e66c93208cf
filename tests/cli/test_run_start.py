"""What a run says and reads before it starts a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.cli.main import main
from dovetail.config import ConfigError
from dovetail.trainer.model_folders import load_readers
from dovetail.trainer.run import run_training
from dovetail.trainer.stopping import Interrupted
from tests.models.tiny import save_tiny_vision_model
from tests.workers.tiny_run import run_config, small_model

pytestmark = pytest.mark.unit


def test_a_run_refuses_what_no_part_of_it_can_do(tmp_path: Path) -> None:
    keys = {
        "data.train_files": "train.parquet",
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.mode": "server",
        "trainer.n_gpus_per_node": 1,
    }
    with pytest.raises(ConfigError) as caught:
        run_training(run_config(small_model(tmp_path), keys), use_ray=False)
    # All at once: the prompts are not there either.
    assert [problem.key.rpartition(".")[2] for problem in caught.value.problems] == ["mode", "train_files"]
    assert "cannot be run in this version" in str(caught.value)


def test_nodes_that_are_not_there_are_refused_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi", "answer": "a"}\n' * 16)
    (tmp_path / "reward.py").write_text("def compute_score(response):\n    return 0.0\n")
    keys = {
        "data.train_files": str(tmp_path / "rows.jsonl"),
        "custom_reward_function.path": str(tmp_path / "reward.py"),
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 4,
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 1,
        "trainer.default_local_dir": str(tmp_path / "run"),
    }
    with pytest.raises(ConfigError, match=r"trainer\.nnodes=2 needs a Ray cluster"):
        run_training(run_config(small_model(tmp_path), keys), use_ray=True)
    assert not (tmp_path / "run").exists()


def test_prompts_are_put_in_the_users_chat_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    config = run_config(small_model(tmp_path), {"actor_rollout_ref.model.custom_chat_template": template})
    tokenizer, processor = load_readers(config)
    assert processor is None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<hi>"


def test_a_processor_without_a_template_has_the_tokenizers(tmp_path: Path) -> None:
    """Older folders have it in tokenizer_config.json, which no processor reads."""
    folder = save_tiny_vision_model(tmp_path)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    for own, expected in ({}, template), ({"actor_rollout_ref.model.custom_chat_template": "{{ 1 }}"}, "{{ 1 }}"):
        config = run_config(folder, {"actor_rollout_ref.model.trust_remote_code": True, **own})
        assert [reader.chat_template for reader in load_readers(config)] == [expected] * 2


def test_an_interrupted_run_says_where_it_is_and_leaves_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dovetail.trainer.run.run_training", interrupted)
    overrides = [
        f"actor_rollout_ref.model.path={small_model(tmp_path)}",
        "data.train_files=train.parquet",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    assert main(["train", *overrides]) == 130
    assert f"interrupted; the run is in {tmp_path}/run. The same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "name", "code"), [(KeyboardInterrupt(), "SIGINT", 130), (Interrupted(15), "SIGTERM", 143)]
)
def test_an_interrupted_command_leaves_no_traceback(
    error: BaseException, name: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: object) -> int:
        raise error

    monkeypatch.setattr("dovetail.cli.demo.run", interrupted)
    assert main(["demo"]) == code
    assert capsys.readouterr().err == f"{name}: stopped.\n"


@pytest.mark.parametrize(
    ("given", "hint"),
    [("kto", "Use dovetail dpo with dpo.loss_type"), ("grpo", "Use dovetail train:"), ("trian", "Did you mean train?")],
)
def test_what_other_libraries_call_a_command_is_found(
    given: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([given])
    assert f"there is no command {given!r}. {hint}" in capsys.readouterr().err
