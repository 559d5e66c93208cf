"""Launch lists that people really use, one list of each family, and every recipe of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.config import load_config
from dovetail.config.checks import check_config
from dovetail.config.effects import unsupported_in_runs
from dovetail.config.plan import make_plan, shape_from_config
from tests.config.plan import known_models as known

pytestmark = pytest.mark.unit

HERE = Path(__file__).parent
COMPAT = sorted((HERE / "compat").glob("*.txt"))
FAMILIES = sorted((HERE / "families").glob("*.txt"))
RECIPES = sorted((HERE.parents[1] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.stem)
def test_the_list_resolves_without_an_unknown_key(path: Path) -> None:
    loaded = load_config(overrides_files=[path])
    assert all(notice.message for notice in loaded.notices)


@pytest.mark.parametrize("path", COMPAT, ids=lambda path: path.stem)
def test_a_published_launch_list_has_no_error_and_a_plan(path: Path) -> None:
    shape = shape_from_config(known.DEEPSEEK_V3 if "671b" in path.name else known.QWEN2_5_32B)
    config = load_config(overrides_files=[path]).config
    assert [finding for finding in check_config(config, shape) if finding.severity == "error"] == []
    plan = make_plan(config, shape)
    assert plan.memory is not None
    assert plan.memory.fits


def test_all_lists_are_there() -> None:
    assert (len(COMPAT), len(FAMILIES)) == (4, 15)
    assert RECIPES


def test_the_671b_list_is_a_megatron_run() -> None:
    config = load_config(overrides_files=[HERE / "compat" / "test_dapo_dspk_671b_megatron_96gb.txt"]).config
    actor = config.actor_rollout_ref.actor
    assert (actor.strategy, actor.megatron.model_parallel_size, config.trainer.world_size) == ("megatron", 16, 512)
    assert actor.megatron.override_transformer_config["num_layers_in_first_pipeline_stage"] == 3
    assert config.data.val_paths == ()
    assert config.actor_rollout_ref.model.path == "<path_to_dsv3_config>"


def test_the_importance_sampling_list_weights_tokens() -> None:
    config = load_config(overrides_files=[HERE / "compat" / "run_dapo_qwen2.5_32b_tis__v0.6.0.txt"]).config
    assert config.algorithm.rollout_correction.rollout_is == "token"
    assert config.reward_model.overlong_buffer.len == 4096
    assert config.data.generation_batch_size == 1536


def test_streamed_and_separate_lists_have_their_own_rollout_devices() -> None:
    config = load_config(overrides_files=[HERE / "families" / "fully_async.txt"]).config
    assert config.data.train_batch_size == 128
    assert config.actor_rollout_ref.rollout.own_devices == 16
    assert (config.async_training.mode, config.staleness_bound) == ("fully_async", 4)
    # A version there is a cycle of 4 updates: 20 cycles are 80 steps, and 51200 prompts are 400 steps of 128.
    assert (config.trainer.total_epochs, config.trainer.test_freq, config.trainer.total_training_steps) == (10, 80, 400)


def test_the_lists_of_the_sft_trainer_set_the_actors_keys() -> None:
    config = load_config(overrides_files=[HERE / "families" / "sft_gsm8k.txt"]).config
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    assert (config.trainer.method, config.data.max_length, config.data.prompt_key) == ("sft", 2048, "extra_info")
    assert (config.sft.prompt_dict_keys, config.sft.response_dict_keys) == (["question"], ["answer"])
    assert (actor.optim.lr, actor.optim.lr_warmup_steps_ratio, actor.optim.lr_scheduler_type) == (1e-4, 0.1, "cosine")
    assert (actor.ppo_micro_batch_size_per_gpu, actor.ulysses_sequence_parallel_size) == (4, 2)
    assert (model.path, model.lora_rank, model.use_remove_padding) == ("/models/Qwen2.5-0.5B-Instruct", 32, True)
    turns = load_config(overrides_files=[HERE / "families" / "sft_multiturn.txt"]).config
    assert (turns.actor_rollout_ref.actor.use_dynamic_bsz, turns.trainer.balance_batch) == (True, True)
    assert turns.trainer.max_actor_ckpt_to_keep == 3


def test_a_script_with_its_shell_still_around_it_means_the_same() -> None:
    loaded = load_config(overrides_files=[HERE / "families" / "shell_leftovers.txt"])
    config = loaded.config
    assert config.actor_rollout_ref.actor.strategy == "megatron"
    assert config.data.train_paths == ("/data/a.parquet", "/data/b.parquet")
    assert (config.trainer.nnodes, config.trainer.project_name) == (2, "my project")
    assert config.trainer.experiment_name == "a name with spaces"
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_resolves_and_can_run(recipe: Path) -> None:
    config = load_config([recipe]).config
    assert [str(finding) for finding in check_config(config) if finding.severity == "error"] == []
    assert unsupported_in_runs(config) == []


def test_the_recipe_for_eight_gpus_fits_into_80_gib() -> None:
    config = load_config([next(path for path in RECIPES if "8gpus" in path.stem)]).config
    plan = make_plan(config, shape_from_config(known.QWEN2_5_7B))
    assert plan.memory is not None
    assert plan.memory.device_bytes == 80 * 2**30
    assert plan.memory.fits, plan.memory.verdict
    assert plan.batches.sequences == 1024
