"""The typed tree: frozen, documented, with defaults in one place and keys that inherit."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from dovetail.config import DovetailConfig, load_config
from dovetail.config.actor import ActorConfig
from dovetail.config.data import DataConfig
from dovetail.config.inherit import inheritance
from dovetail.config.keys import catalogue, sections
from dovetail.config.optim import OptimConfig
from dovetail.config.rollout import RolloutConfig

pytestmark = pytest.mark.unit


def test_every_key_and_every_section_is_documented() -> None:
    assert [name for name, key in catalogue(DovetailConfig).items() if not key.field.description] == []
    assert [name for name, section in sections(DovetailConfig).items() if not section.__doc__] == []
    assert len(catalogue(DovetailConfig)) > 350


def test_a_section_cannot_be_changed_and_refuses_unknown_keys() -> None:
    config = DovetailConfig()
    with pytest.raises(ValidationError):
        config.trainer.seed = 7  # type: ignore[misc]
    with pytest.raises(ValidationError):
        ActorConfig.model_validate({"clip_ratio_hgih": 0.28})


def test_defaults_that_differ_on_purpose() -> None:
    config = DovetailConfig()
    assert config.actor_rollout_ref.rollout.name == "native"
    assert config.trainer.device == "auto"
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"


def test_null_means_the_same_as_another_key() -> None:
    config = DovetailConfig.model_validate(
        {
            "data": {"max_prompt_length": 64, "max_response_length": 32},
            "actor_rollout_ref": {
                "model": {"path": "/models/a"},
                "actor": {
                    "strategy": "megatron",
                    "megatron": {"tensor_model_parallel_size": 4},
                    "use_dynamic_bsz": True,
                },
                "ref": {"strategy": None},
            },
            "critic": {"ppo_mini_batch_size": 8},
        }
    )
    policy = config.actor_rollout_ref
    assert (policy.ref.strategy, config.critic.strategy, config.reward_model.strategy) == ("megatron",) * 3
    assert policy.ref.megatron.tensor_model_parallel_size == 4
    assert policy.rollout.context_length == 96
    assert config.critic.model.path == "/models/a"
    assert config.reward_model.use_dynamic_bsz is True  # reward model <- critic <- actor
    assert config.critic.ppo_mini_batch_size == 8


def test_every_inherited_key_names_a_key_that_exists_and_has_its_default() -> None:
    config = DovetailConfig().model_dump()
    known = catalogue(DovetailConfig)
    for key, source in inheritance(DovetailConfig).items():
        assert source in known, key
        assert _value(config, key) == _value(config, source), key


def test_derived_values() -> None:
    actor = ActorConfig(clip_ratio=0.3, clip_ratio_high=0.4)
    assert (actor.clip_low, actor.clip_high) == (0.3, 0.4)
    assert DataConfig(val_files=[""]).val_paths == ()
    assert DataConfig(val_files=None).val_paths == ()
    assert DataConfig(train_files="a.parquet", train_batch_size=8).generation_batch_size == 8
    assert OptimConfig(lr_warmup_steps_ratio=0.1).warmup_steps(50) == 5
    assert OptimConfig(lr=1.0, min_lr_ratio=0.1).lowest_lr == pytest.approx(0.1)
    assert RolloutConfig(max_model_len=77).context_length == 77
    config = DovetailConfig.model_validate({"trainer": {"project_name": "p", "experiment_name": 42, "logger": "wandb"}})
    assert config.trainer.run_dir == "runs/p/42"
    assert config.trainer.loggers == ("wandb",)
    assert config.uses_critic
    assert not config.uses_reference


def test_a_dumped_configuration_builds_the_same_configuration() -> None:
    config = DovetailConfig.model_validate(
        {"algorithm": {"adv_estimator": "grpo"}, "ray_init": {"logging_level": "warn"}}
    )
    assert DovetailConfig.model_validate(config.model_dump(mode="json")) == config
    assert config.ray_init.init_arguments == {"logging_level": "warn"}


def test_an_unregistered_name_is_refused_when_built_directly_too() -> None:
    with pytest.raises(ValidationError, match="import_modules"):
        DovetailConfig.model_validate({"algorithm": {"adv_estimator": "mine"}})
    tree = {"algorithm": {"adv_estimator": "mine"}, "trainer": {"import_modules": ["my.module"]}}
    assert DovetailConfig.model_validate(tree).algorithm.adv_estimator == "mine"


def _value(tree: dict, key: str) -> object:
    for part in key.split("."):
        tree = tree[part]
    return tree


def test_a_tilde_in_a_model_path_is_the_home_folder_in_files_too(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("actor_rollout_ref: {model: {path: ~/models/policy}}\nreward_model: {model: {path: ~/judge}}\n")
    config = load_config([file]).config
    home = str(Path.home())
    assert config.actor_rollout_ref.model.path == f"{home}/models/policy"
    assert config.critic.model.path == config.actor_rollout_ref.model.tokenizer_source == f"{home}/models/policy"
    assert config.reward_model.model.path == f"{home}/judge"
