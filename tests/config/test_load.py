"""Files, launch lists and overrides become one configuration, or one error with every problem."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dovetail.config import ConfigError, load_config

pytestmark = pytest.mark.unit

ACTOR = "actor_rollout_ref.actor"


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    return [str(problem) for problem in caught.value.problems]


def test_a_misspelt_key_is_refused_with_the_right_one() -> None:
    (message,) = problems(f"{ACTOR}.clip_ratio_hgih=0.28")
    assert message == f"{ACTOR}.clip_ratio_hgih is not a known key; did you mean {ACTOR}.clip_ratio_high?"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.lr=1", f"{ACTOR}.optim.lr"),
        ("data.train_batchsize=1", "data.train_batch_size"),
        ("actor_rollout_ref.rolout.n=4", "actor_rollout_ref.rollout.n"),
        ("policy.model.path=x", "actor_rollout_ref.model.path"),
        ("ray_init.adress=auto", "ray_init.address"),
        ("trianer.seed=1", "trainer.seed"),
        ("crtic.optim.lr=1", "critic.optim.lr"),
    ],
)
def test_the_nearest_key_is_found_by_its_last_word_or_by_its_path(wrong: str, right: str) -> None:
    (message,) = problems(wrong)
    assert f"did you mean {right}?" in message


def test_a_file_with_a_slip_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data:\n\ttrain_files: a\n")
    for name, says in (("run.yaml", "the line begins with a tab"), ("run.yml", f"(did you mean {tmp_path}/run.yaml?)")):
        with pytest.raises(ConfigError, match=re.escape(says)):
            load_config([tmp_path / name])


def test_all_problems_are_reported_at_once() -> None:
    messages = problems(
        f"{ACTOR}.strategy=fsdp3",
        "data.trian_files=x",
        "trainer.nnodes=True",
        "trainer.total_epochs=0",
        "algorithm.adv_estimator=gro",
        "data.val_files=[a",
        "actor_rollout_ref.rollout.top_p=much",
        f"{ACTOR}.checkpoint.save_contents=[model,weights]",
    )
    assert len(messages) == 8
    text = "\n".join(messages)
    assert f"{ACTOR}.strategy='fsdp3' is not accepted; it must be one of single, fsdp, fsdp2, megatron." in text
    assert "trainer.nnodes=True is not accepted; it must be an integer >= 1." in text
    assert "Did you mean grpo?" in text


def test_a_wrong_value_is_reported_where_it_was_written_not_where_it_is_inherited() -> None:
    (message,) = problems(f"{ACTOR}.ppo_micro_batch_size_per_gpu=0")
    assert message.startswith(f"{ACTOR}.ppo_micro_batch_size_per_gpu=0")


def test_a_choice_by_the_name_it_has_elsewhere_is_suggested() -> None:
    (message,) = problems("trainer.device=gpu")
    assert message.endswith("Did you mean cuda?")


def test_a_shell_variable_left_in_a_list_is_named() -> None:
    (message,) = problems("trainer.nnodes=$NNODES")
    assert "shell variable" in message
    messages = problems("trainer.nnodes=${NNODES}", "data.train_files=[${FILE}]", "trainer.seed=-1")
    assert len(messages) == 3
    assert messages[1].startswith("trainer.nnodes: the interpolation cannot be resolved")
    assert all("shell variable" in message for message in messages[:2])


def test_a_section_cannot_be_set_to_a_value() -> None:
    assert "trainer is a section" in problems("trainer=5")[0]
    assert "nothing can be set below it" in problems("critic=5", "critic.grad_clip=1.0")[0]


def test_files_launch_lists_and_overrides_win_in_this_order(tmp_path: Path) -> None:
    first, second, launch = tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "c.txt"
    first.write_text("trainer: {project_name: one, experiment_name: one, nnodes: 1, total_epochs: 1}\n")
    second.write_text("trainer: {experiment_name: two, nnodes: 2, total_epochs: 2}\n")
    launch.write_text("trainer.nnodes=3\ntrainer.total_epochs=3\n")
    loaded = load_config([first, second], ["trainer.total_epochs=4"], overrides_files=[launch])
    trainer = loaded.config.trainer
    assert (trainer.project_name, trainer.experiment_name, trainer.nnodes, trainer.total_epochs) == ("one", "two", 3, 4)
    assert loaded.sources["trainer.nnodes"] == str(launch)
    assert loaded.sources["trainer.total_epochs"] == "override"
    assert loaded.tree["trainer"]["project_name"] == "one"


def test_interpolations_see_set_keys_defaults_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_NODES", "3")
    path = tmp_path / "a.yaml"
    path.write_text(
        "data: {max_prompt_length: 100}\n"
        "actor_rollout_ref: {rollout: {max_model_len: '${data.max_prompt_length}'}}\n"
        "trainer: {experiment_name: 'seed-${trainer.seed}', nnodes: '${oc.env:SOME_NODES}'}\n"
        "algorithm: {kl_ctrl: {kl_coef: 1e-3}}\n"
    )
    config = load_config([path]).config
    assert config.actor_rollout_ref.rollout.max_model_len == 100
    assert config.trainer.experiment_name == "seed-42"
    assert config.trainer.nnodes == 3
    assert config.algorithm.kl_ctrl.kl_coef == pytest.approx(1e-3)


def test_a_missing_or_broken_file_is_a_problem_with_its_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1\n")
    with pytest.raises(ConfigError) as caught:
        load_config([tmp_path / "missing.yaml", broken], overrides_files=[tmp_path / "missing.txt"])
    assert len(caught.value.problems) == 3


def test_tilde_takes_a_key_back_to_its_default(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("trainer: {seed: 7, nnodes: 2}\n")
    assert load_config([path], ["~trainer.seed"]).config.trainer.seed == 42
    assert "did you mean trainer.seed" in problems("~trainer.sed")[0]


def test_free_form_keys_take_anything() -> None:
    model = "actor_rollout_ref.model.override_config"
    engine = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    config = load_config(
        overrides=[
            f"+{model}.rope_scaling.factor=4.0",
            f"+{engine}.compilation_config={{level:3}}",
            "ray_init.labels.b=1",
        ]
    ).config
    assert config.actor_rollout_ref.model.override_config == {"rope_scaling": {"factor": 4.0}}
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"compilation_config": {"level": 3}}
    assert config.ray_init.init_arguments == {"labels": {"b": 1}}


def test_a_users_own_names_need_a_module_that_registers_them() -> None:
    mine = ["algorithm.adv_estimator=mine", f"{ACTOR}.policy_loss.loss_mode=my_loss"]
    assert len(problems(*mine)) == 2
    config = load_config(overrides=[*mine, "trainer.import_modules=[my.module]"]).config
    assert config.algorithm.adv_estimator == "mine"


def test_null_on_a_key_without_null_is_its_default_and_says_so() -> None:
    loaded = load_config(overrides=["custom_reward_function.name=null", "critic.optim.lr_warmup_steps=None"])
    assert loaded.config.custom_reward_function.name == "compute_score"
    assert len(loaded.notices) == 2


def test_npu_resolves_with_a_notice() -> None:
    loaded = load_config(overrides=["trainer.device=npu"])
    assert loaded.config.trainer.device == "npu"
    assert "no backend here runs on it" in str(loaded.notices[0])


def test_a_resolved_configuration_loads_again_unchanged(tmp_path: Path) -> None:
    import yaml

    config = load_config(overrides=["trainer.seed=7", f"{ACTOR}.optim.betas=[0.9,0.95]"]).config
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    again = load_config([path])
    assert again.config == config
    assert again.notices == ()


def test_a_folder_or_a_data_file_in_the_place_of_a_yaml_file_is_answered_with_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    for name, meant in (("run", f"model={tmp_path}/run"), ("rows.jsonl", f"data={tmp_path}/rows.jsonl")):
        with pytest.raises(ConfigError, match=re.escape(f"did you mean {meant}?")):
            load_config([tmp_path / name])
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"is a folder; did you mean .*/run/config\.yaml\?"):
        load_config([tmp_path / "run"])
