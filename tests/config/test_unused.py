"""Keys that other keys switch off: each says so when it is set, and is silent when it acts."""

from __future__ import annotations

import inspect
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from dovetail.algorithms import get_adv_estimator_fn, get_policy_loss_fn
from dovetail.config import DovetailConfig, load_config
from dovetail.config.base import ReadWith
from dovetail.config.keys import catalogue, sections
from dovetail.config.names import ADV_ESTIMATORS, POLICY_LOSSES

pytestmark = pytest.mark.unit

P, A, R = "actor_rollout_ref", "actor_rollout_ref.actor", "actor_rollout_ref.ref"
M, C = f"{P}.model", "algorithm.rollout_correction"
GRPO, TWO = "algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=2"
GDPO, AGENTS = "algorithm.adv_estimator=gdpo", f"{P}.rollout.multi_turn.enable=True"
BUFFER = "reward_model.overlong_buffer.enable=True"

# The key that is switched off, words of the reason, and what switches it on.
SWITCHED_OFF: list[tuple[list[str], str, str, list[str]]] = [
    ([f"{P}.rollout.name=sglang"], f"{P}.rollout.scheduling_policy=priority", "vllm reads", [f"{P}.rollout.name=vllm"]),
    ([f"{P}.rollout.name=sglang"], f"{P}.rollout.engine_kwargs.vllm.a=1", "vllm reads", [f"{P}.rollout.name=vllm"]),
    (
        [f"{P}.rollout.name=vllm", f"{P}.rollout.mode=server", f"{P}.rollout.server_urls=['http://a:1']"],
        f"{P}.rollout.gpu_memory_utilization=0.3",
        "run already",
        [f"{P}.rollout.mode=sync", f"{P}.rollout.server_urls=[]"],
    ),
    ([GRPO], "critic.optim.lr=1e-3", "no critic is trained", ["critic.enable=True"]),
    ([GRPO], "critic.use_dynamic_bsz=True", "no critic is trained", ["reward_model.enable=True"]),
    ([], f"{R}.fsdp_config.param_offload=True", "no reference is computed", [f"{A}.use_kl_loss=True"]),
    ([], "reward_model.max_length=9", "no reward network", ["reward_model.enable=True"]),
    (
        ["reward_model.reward_kwargs.rewards=[{rule: exact}]"],
        "custom_reward_function.path=score.py",
        "rewards lists the functions that score",
        ["reward_model.reward_kwargs.rewards=[]"],
    ),
    (
        [TWO, f"{A}.strategy=megatron"],
        f"{A}.fsdp_config.param_offload=True",
        "megatron shards",
        [f"{A}.strategy=fsdp2"],
    ),
    (["trainer.n_gpus_per_node=1"], f"{A}.fsdp_config.forward_prefetch=True", "one device", [TWO]),
    ([f"{A}.strategy=megatron"], f"{M}.use_remove_padding=False", "always packs", [f"{A}.strategy=fsdp"]),
    (
        [f"{A}.strategy=megatron"],
        f"{A}.entropy_checkpointing=True",
        "keeps nothing",
        [f"{A}.strategy=fsdp", f"{A}.entropy_coeff=1"],
    ),
    (
        [f"{A}.strategy=megatron"],
        f"{A}.megatron.dist_checkpointing_path=/a",
        "reads it",
        [f"{A}.megatron.use_dist_checkpointing=True"],
    ),
    ([], f"{A}.entropy_checkpointing=True", "computes no entropy", [f"{A}.entropy_coeff=0.1"]),
    (
        [f"{A}.entropy_coeff=0.1", f"{M}.use_fused_kernels=True"],
        f"{A}.entropy_checkpointing=True",
        "keeps nothing",
        [f"{M}.use_fused_kernels=False"],
    ),
    ([], f"{A}.policy_loss.dro_beta=1", "loss_mode dro", [f"{A}.policy_loss.loss_mode=dro"]),
    ([], f"{A}.policy_loss.vespo_k_neg=1", "loss_mode vespo", [f"{A}.policy_loss.loss_mode=vespo"]),
    (
        [f"{A}.policy_loss.loss_mode=gpg"],
        f"{A}.clip_ratio_high=0.3",
        "loss_mode vanilla or",
        [f"{A}.policy_loss.loss_mode=gspo"],
    ),
    (
        [f"{A}.policy_loss.loss_mode=sapo"],
        f"{A}.loss_agg_mode=seq-mean-token-sum",
        "its own aggregation",
        [f"{A}.policy_loss.loss_mode=vanilla"],
    ),
    ([GRPO], "algorithm.lam=0.9", "adv_estimator gae", ["algorithm.adv_estimator=gae"]),
    ([GDPO], "algorithm.use_kl_in_reward=True", "as the reward function returns them", [GRPO]),
    ([GDPO, AGENTS], "algorithm.turn_discount=0.9", "as the reward function returns them", [GRPO, AGENTS]),
    (
        [GDPO, "reward_model.reward_manager=dapo"],
        BUFFER,
        "as the reward function returns them",
        [GRPO, "reward_model.reward_manager=dapo"],
    ),
    ([], f"{A}.kl_loss_coef=0.5", "use_kl_loss=True reads it", [f"{A}.use_kl_loss=True"]),
    ([], "algorithm.kl_ctrl.kl_coef=0.5", "use_kl_in_reward=True reads it", ["algorithm.use_kl_in_reward=True"]),
    (
        ["algorithm.use_kl_in_reward=True"],
        "algorithm.kl_ctrl.target_kl=9",
        "adaptive",
        ["algorithm.kl_ctrl.type=adaptive"],
    ),
    ([], f"{C}.rollout_is_threshold=3", "makes no weights", [f"{C}.rollout_is=token"]),
    ([], f"{C}.rollout_rs_threshold=3", "names no rule", [f"{C}.rollout_rs=token_k1"]),
    ([], "algorithm.filter_groups.metric=acc", "enable=True reads it", ["algorithm.filter_groups.enable=True"]),
    ([], "reward_model.overlong_buffer.len=7", "enable=True reads it", [BUFFER, "reward_model.reward_manager=dapo"]),
    ([], BUFFER, "reward_manager=dapo reads it", ["reward_model.reward_manager=dapo"]),
    ([], "trainer.test_freq=5", "names no file", ["data.val_files=a.parquet"]),
    ([], "trainer.validation_data_dir=/a", "names no file", ["data.val_files=a.parquet"]),
    ([], "trainer.log_val_generations=5", "names no file", ["data.val_files=a.parquet"]),
    ([], "trainer.resume_from_path=/a", "resume_path reads it", ["trainer.resume_mode=resume_path"]),
    ([], "trainer.max_actor_ckpt_to_keep=2", "writes none", ["trainer.save_freq=5"]),
    ([], "data.gen_batch_size=128", "enable=True reads it", ["algorithm.filter_groups.enable=True"]),
    (["trainer.device=cpu", TWO], f"{A}.fsdp_config.param_offload=True", "host memory", ["trainer.device=cuda"]),
    ([f"{A}.strategy=megatron"], f"{A}.ulysses_sequence_parallel_size=2", "context_parallel", [f"{A}.strategy=fsdp2"]),
    ([f"{A}.strategy=fsdp2"], f"{A}.megatron.dtype=fp32", "strategy=megatron` only", [f"{A}.strategy=megatron"]),
    ([], f"{A}.loss_scale_factor=9", "token-sum-norm reads it", [f"{A}.loss_agg_mode=seq-mean-token-sum-norm"]),
    (
        [f"{A}.use_dynamic_bsz=True"],
        f"{A}.ppo_micro_batch_size_per_gpu=2",
        "use_dynamic_bsz=False reads it",
        [f"{A}.use_dynamic_bsz=False"],
    ),
    (
        [f"{M}.use_fused_kernels=True"],
        f"{A}.entropy_from_logits_with_chunking=True",
        "keeps nothing",
        [f"{M}.use_fused_kernels=False"],
    ),
    ([], f"{M}.fused_kernel_options.impl_backend=triton", "=True reads it", [f"{M}.use_fused_kernels=True"]),
    (
        [f"{P}.rollout.name=vllm", f"{P}.rollout.enforce_eager=True"],
        f"{P}.rollout.cudagraph_capture_sizes=[1]",
        "no graphs",
        [f"{P}.rollout.enforce_eager=False"],
    ),
    ([], f"{P}.rollout.val_kwargs.temperature=0.7", "does not sample", [f"{P}.rollout.val_kwargs.do_sample=True"]),
    ([], f"{M}.lora_alpha=3", "no adapter", [f"{M}.lora_rank=8"]),
    ([], f"{A}.optim.momentum=0.5", "SGD reads it", [f"{A}.optim.optimizer=SGD"]),
    ([], f"{A}.optim.min_lr_ratio=0.5", "does not decay", [f"{A}.optim.lr_scheduler_type=cosine"]),
    ([], f"{A}.optim.lr_warmup_init=0.5", "no warm-up", [f"{A}.optim.lr_warmup_steps=3"]),
    ([], f"{P}.rollout.val_kwargs.top_p=0.7", "does not sample", [f"{P}.rollout.val_kwargs.do_sample=True"]),
]


def readers(name: str, section: str) -> dict[str, tuple[str, ...]]:
    """Keys below `section` that only some values of the key `name` read, with these values."""
    return {
        key.name.removeprefix(f"{section}."): rule.when.values
        for key in catalogue(DovetailConfig).values()
        for rule in key.rules
        if isinstance(rule.when, ReadWith) and rule.when.name == name and rule.when.known
    }


LOSSES_THAT_READ = readers("loss_mode_in_force", A)
ESTIMATORS_THAT_READ = readers("algorithm.adv_estimator", "algorithm")


def reported(overrides: list[str], key: str) -> list[str]:
    notices = (str(notice) for notice in load_config(overrides=overrides).notices)
    return [notice for notice in notices if "no effect in this run" in notice and f"{key}=" in notice]


@pytest.mark.parametrize(("others", "override", "words", "switch"), SWITCHED_OFF, ids=lambda value: str(value)[:60])
def test_a_key_that_is_switched_off_says_why_and_one_that_acts_says_nothing(
    others: list[str], override: str, words: str, switch: list[str]
) -> None:
    key = override.partition("=")[0]
    (notice,) = reported([*others, override], key)
    assert words in notice
    assert reported([*others, *switch, override], key) == []


def test_a_weight_of_zero_asks_for_nothing() -> None:
    """Launch lists write these beside the switch that turns them off."""
    assert load_config(overrides=[f"{A}.kl_loss_coef=0.0", "algorithm.kl_ctrl.kl_coef=0.0"]).notices == ()


def test_a_loss_or_an_estimator_that_a_user_registers_may_read_any_key() -> None:
    own = ["trainer.import_modules=[mine]", f"{A}.policy_loss.loss_mode=mine", "algorithm.adv_estimator=mine"]
    for override in (f"{A}.policy_loss.dro_beta=1", f"{A}.clip_ratio_c=9", "algorithm.lam=0.9"):
        assert reported([*own, override], override.partition("=")[0]) == []


def test_many_keys_of_one_role_are_one_notice(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "algorithm: {adv_estimator: grpo}\ncritic: {grad_clip: 9, shuffle: true, ppo_epochs: 3, nccl_timeout: 4}"
    )
    (notice,) = load_config([file]).notices
    assert "critic.grad_clip=9" in str(notice)
    assert "and 1 more" in str(notice)


@pytest.mark.parametrize("mode", POLICY_LOSSES)
def test_the_table_of_losses_is_what_they_take(mode: str) -> None:
    loss = get_policy_loss_fn(mode)
    taken = getattr(loss, "settings_read", None) or inspect.signature(loss).parameters
    assert len(LOSSES_THAT_READ) == 16
    for key, modes in LOSSES_THAT_READ.items():
        assert (key.rpartition(".")[2] in taken) == (mode in modes), key


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_the_table_of_estimators_is_what_they_take(name: str) -> None:
    estimator = get_adv_estimator_fn(name)
    taken = getattr(estimator, "settings_read", None) or inspect.signature(estimator).parameters
    assert len(ESTIMATORS_THAT_READ) == 4
    for key, estimators in ESTIMATORS_THAT_READ.items():
        assert (key in taken) == (name in estimators), key


def test_every_rule_asks_for_keys_that_exist() -> None:
    config = DovetailConfig()
    for key in catalogue(DovetailConfig).values():
        for rule in key.rules:
            assert rule.when is None or rule.when(config, key.name) in (True, False), key.name
            assert "{" not in rule.words(config, key.name)


def test_every_pattern_of_a_section_is_for_a_key_that_exists() -> None:
    covered = {rule for key in catalogue(DovetailConfig).values() for rule in key.rules}
    for name, section in sections(DovetailConfig).items():
        below = [key.removeprefix(f"{name}.") for key in catalogue(DovetailConfig) if key.startswith(f"{name}.")]
        for rule in section.rules:
            assert rule in covered
            for pattern in (*rule.only, *rule.but):
                assert any(fnmatchcase(key, pattern) for key in below), f"{name}: {pattern}"
