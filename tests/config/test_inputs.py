"""What a user writes: files and overrides apart, values that no run can mean, keys left open in parts that are off."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.config import ConfigError, load_config
from dovetail.config.errors import Problem
from dovetail.config.keys import catalogue
from dovetail.config.overrides import split_arguments
from dovetail.config.ray_init import refuse_rank_variables
from dovetail.config.root import DovetailConfig

pytestmark = pytest.mark.unit

A = "actor_rollout_ref.actor"


def test_tilde_and_equals_in_a_path_do_not_make_it_an_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1.yaml").write_text("trainer: {seed: 7}\n")
    items = ["~/lr=1.yaml", "lr=1.yaml", "sweep/lr=1/a.yaml", "a.yaml", "~trainer.seed", "+a.b=c/d.yaml", "a.b=x.yaml"]
    files, overrides = split_arguments(items)
    assert files == [tmp_path / "lr=1.yaml", Path("lr=1.yaml"), Path("sweep/lr=1/a.yaml"), Path("a.yaml")]
    assert overrides == ["~trainer.seed", "+a.b=c/d.yaml", "a.b=x.yaml"]
    assert load_config(*split_arguments(items[:2])).config.trainer.seed == 7


@pytest.mark.parametrize(
    "spelling", ["--config-path={}\n--config-name='tools'", "--config-path {} --config-name tools.yaml"]
)
def test_the_file_of_config_name_is_read_with_its_bases_before_the_overrides(tmp_path: Path, spelling: str) -> None:
    (tmp_path / "base.yaml").write_text("trainer: {seed: 5, nnodes: 3}\n")
    turns = "actor_rollout_ref: {rollout: {multi_turn: {enable: true, max_assistant_turns: 5}}}\n"
    (tmp_path / "tools.yaml").write_text(f"defaults: [ppo_trainer, base, _self_]\ntrainer: {{seed: 6}}\n{turns}")
    written = spelling.format(tmp_path)
    (tmp_path / "list.txt").write_text(f"{written} \\\n  trainer.total_epochs=2\n")
    loaded = load_config(overrides_files=[tmp_path / "list.txt"])
    words = written.replace("'", "").split()
    assert load_config(*split_arguments(["trainer.total_epochs=2", *words])).config == loaded.config
    config = loaded.config
    assert (config.trainer.seed, config.trainer.nnodes, config.trainer.total_epochs) == (6, 3, 2)
    assert config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns == 5
    assert load_config(overrides=["trainer.seed=1", *words]).config.trainer.seed == 1


def test_a_file_of_config_name_that_is_not_there_is_refused_unless_it_is_of_verl() -> None:
    with pytest.raises(ConfigError, match=r"--config-name=mine: config/mine\.yaml is not a file"):
        load_config(overrides=["--config-path=config", "--config-name=mine"])
    loaded = load_config(overrides=["--config-path=config", "--config-name=fully_async_ppo_megatron_trainer.yaml"])
    assert loaded.config.actor_rollout_ref.actor.strategy == "megatron"
    assert [notice.key for notice in loaded.notices] == ["--config-name=fully_async_ppo_megatron_trainer"]


def test_home_is_expanded_in_every_path_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(
        overrides=["data.train_files=[~/a.parquet,/b=c.parquet]", "trainer.default_local_dir=~/runs/x"]
    ).config
    assert config.data.train_paths == (f"{tmp_path}/a.parquet", "/b=c.parquet")
    assert config.trainer.run_dir == f"{tmp_path}/runs/x"
    with pytest.raises(ConfigError, match=r"data\.val_files='~nobody_here/a': ~nobody_here is the home of no user"):
        load_config(overrides=["data.val_files=~nobody_here/a"])


@pytest.mark.parametrize(
    "override",
    [
        f"{A}.optim.weight_decay=1e30",
        f"{A}.optim.eps=1e308",
        f"{A}.optim.lr=inf",
        f"{A}.optim.lr=nan",
        f"{A}.optim.lr=1e30",
        f"{A}.optim.betas=[0.9,1.5]",
        "data.train_batch_size=1e400",
        f"data.train_batch_size={10**30}",
        f"data.train_batch_size={'9' * 5000}",
        "trainer.seed=99999999999999999999",
        "trainer.project_name=a\0b",
        "trainer.project_name=../../..",
        "trainer.experiment_name=/tmp",
        "trainer.experiment_name=''",
        "data.prompt_key=5",
        "data.reward_fn_key=''",
        f"{A}.optim.override_optimizer_config={{lr: [1, .nan], x: 1e400}}",
        'trainer.worker_env={"WORLD_SIZE": "100"}',
        "ray_init.runtime_env.env_vars.RANK=3",
    ],
)
def test_a_value_that_no_run_can_mean_is_refused_by_its_key(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[override])
    [problem] = caught.value.problems
    key = override.partition("=")[0]
    known = key.replace("trainer.worker_env", "ray_init.runtime_env").removesuffix(".env_vars.RANK")
    assert problem.key in (key, known, override, f"{key}.x"), problem
    assert len(str(problem)) < 6000


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1.0e+400", "1e30", str(10**30), "9" * 5000, "'a\\0b'"])
@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_yaml_is_refused_as_the_command_line_is(key: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"actor_rollout_ref: {{actor: {{optim: {{{key}: {value}}}}}}}\n")
    with pytest.raises(ConfigError):
        load_config([file])


def test_the_environment_of_a_group_of_workers_leaves_ranks_alone() -> None:
    refuse_rank_variables({"NCCL_DEBUG": "INFO"})
    with pytest.raises(ValueError, match=r"WORLD_SIZE cannot be set: every worker gets its own from its group"):
        refuse_rank_variables({"NCCL_DEBUG": "INFO", "WORLD_SIZE": "100"})


def test_names_that_stay_below_runs_are_fine() -> None:
    trainer = load_config(overrides=["trainer.project_name=a b/c..d", "trainer.experiment_name=42"]).config.trainer
    assert trainer.run_dir == "runs/a b/c..d/42"


def test_a_key_left_open_matters_only_where_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "generated.yaml"
    file.write_text(
        "critic:\n  model:\n    path: ???\n  optim:\n    lr: ???\n"
        "reward_model:\n  model:\n    path: ???\n"
        "actor_rollout_ref:\n  rollout:\n    multi_turn:\n      tool_config_path: ???\n"
    )
    config = load_config([file], ["algorithm.adv_estimator=grpo"]).config
    assert not config.uses_critic
    with pytest.raises(ConfigError) as caught:
        load_config([file], ["algorithm.adv_estimator=gae", "reward_model.enable=True"])
    open_keys = {problem.key for problem in caught.value.problems}
    assert open_keys == {"critic.model.path", "critic.optim.lr", "reward_model.model.path"}
    file.write_text("data:\n  train_batch_size: ???\n")
    with pytest.raises(ConfigError, match=r"data\.train_batch_size is \?\?\? in .*generated\.yaml: it must be set"):
        load_config([file])


def test_a_launch_list_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "launch.txt"
    file.write_bytes(b"\xff\xfe\x00trainer.seed=1")
    with pytest.raises(ConfigError, match=r"launch\.txt cannot be read as a launch list"):
        load_config(overrides_files=[file])


ODD = [
    "null",
    "''",
    "-1",
    "0",
    "1e400",
    "nan",
    "[]",
    "{}",
    "[1,[2]]",
    "{a: 1}",
    "text",
    "True",
    "~nobody_here/x",
    "9" * 30,
]


@pytest.mark.parametrize("shift", range(3))
def test_no_value_of_any_key_ends_in_another_error_than_ours(shift: int) -> None:
    for number, key in enumerate(catalogue(DovetailConfig)):
        value = ODD[(number * 5 + shift) % len(ODD)]
        problems: tuple[Problem, ...] | None = None
        try:
            load_config(overrides=[f"{key}={value}"])
        except ConfigError as error:
            problems = error.problems
        assert problems != (), f"{key}={value} is refused without a word"
