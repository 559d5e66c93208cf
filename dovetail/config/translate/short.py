"""Short names for what every run must say: `model=... data=... reward=...`, on a launch line and from Python.

A run that uses one of them has its open keys fitted to the model, the data and the machine (`dovetail.trainer.choose`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.config.translate.engines import chosen_file
from dovetail.config.user_code import split_address

SHORT_NAMES: dict[str, tuple[str, str]] = {
    "model": ("actor_rollout_ref.model.path", "folder of the policy, or its name on the hub"),
    "data": ("data.train_files", "training prompts: a file, or a list of files"),
    "val_data": ("data.val_files", "validation prompts"),
    "reward": (
        "custom_reward_function.path",
        "`file.py:function` or `pkg://module:function`; the name of a built-in rule; or a reward model, by its folder "
        "or its name on the hub",
    ),
    "engine": ("actor_rollout_ref.rollout.name", "native, vllm or sglang"),
    "output": ("trainer.default_local_dir", "run folder"),
    "steps": ("trainer.total_training_steps", "steps of the run"),
    "lr": ("actor_rollout_ref.actor.optim.lr", "learning rate"),
}
"""Name -> the key that it sets, and what it takes. `reward` sets other keys when it names no function."""

_ACTOR = "actor_rollout_ref.actor"
USUAL_NAMES: dict[str, str] = {
    "train_dataset": "data",
    "eval_dataset": "val_data",
    "reward_funcs": "reward",
    "learning_rate": "lr",
    "output_dir": "output",
    "max_steps": "steps",
    "num_train_epochs": "trainer.total_epochs",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "report_to": "trainer.logger",
    "per_device_train_batch_size": "data.train_batch_size (prompts per step, on all devices together)",
    "gradient_accumulation_steps": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "max_completion_length": "data.max_response_length",
    "num_generations": "actor_rollout_ref.rollout.n",
    "num_iterations": f"{_ACTOR}.ppo_epochs",
    "epsilon": f"{_ACTOR}.clip_ratio_low",
    "epsilon_high": f"{_ACTOR}.clip_ratio_high",
    "max_grad_norm": f"{_ACTOR}.grad_clip",
    "warmup_steps": f"{_ACTOR}.optim.lr_warmup_steps",
    "warmup_ratio": f"{_ACTOR}.optim.lr_warmup_steps_ratio",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "mask_truncated_completions": "algorithm.filter_truncated",
    "gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "peft_config": "actor_rollout_ref.model.lora_rank",
    "use_vllm": "engine",
    "vllm_mode": "actor_rollout_ref.rollout.mode",
    "vllm_gpu_memory_utilization": "actor_rollout_ref.rollout.gpu_memory_utilization",
    "vllm_importance_sampling_correction": "algorithm.rollout_correction.rollout_is",
    "cast_lm_head_to_fp32": "actor_rollout_ref.rollout.fp32_lm_head",
    "use_liger_kernel": "actor_rollout_ref.model.use_fused_kernels",
    "loss_type": f"{_ACTOR}.loss_agg_mode",
    "importance_sampling_level": f"{_ACTOR}.policy_loss.loss_mode (gspo for sequence)",
    "use_bias_correction_kl": f"{_ACTOR}.kl_loss_type (k3_unbiased)",
    "off_policy_mask_threshold": f"{_ACTOR}.policy_loss.off_policy_mask_threshold",
    "delta": f"{_ACTOR}.clip_ratio_c",
    "steps_per_generation": f"{_ACTOR}.ppo_mini_batch_size (prompts per optimizer step)",
    "generation_batch_size": "data.train_batch_size (prompts, not responses)",
    "reward_weights": "reward_model.reward_kwargs (rewards: a list with weights)",
    "stop_token_ids": "actor_rollout_ref.rollout.stop_token_ids",
    "rollout_stop_token_ids": "actor_rollout_ref.rollout.stop_token_ids",
    "rollout_stop": "actor_rollout_ref.rollout.stop_token_ids (ids of tokens; there are no stop strings)",
    "eos_token": "actor_rollout_ref.rollout.stop_token_ids (the end of a turn of the chat template is found)",
    "eos_token_id": "actor_rollout_ref.rollout.stop_token_ids",
    "generation_kwargs": "actor_rollout_ref.rollout.stop_token_ids (and temperature, top_p, top_k, min_p beside it)",
    "chat_template_kwargs": "data.apply_chat_template_kwargs",
    "save_total_limit": "trainer.max_actor_ckpt_to_keep",
    "metric_for_best_model": "trainer.save_best (the whole name of a metric of the validation)",
    "load_best_model_at_end": "trainer.save_best (a metric of the validation; then `dovetail export RUN OUT --best`)",
    "greater_is_better": "trainer.save_best_mode",
    "run_name": "trainer.experiment_name",
    "callbacks": "trainer.on_step",
    "processing_class": "data.tokenizer",
    "bf16": f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype",
    "epochs": "trainer.total_epochs",
    "num_epochs": "trainer.total_epochs",
    "num_steps": "steps",
    "batch_size": "data.train_batch_size (prompts per step, on all devices together)",
    "model_name": "model",
    "model_name_or_path": "model",
    "train_data": "data",
    "eval_data": "val_data",
    "reward_fn": "reward",
    "max_tokens": "data.max_response_length",
    "max_new_tokens": "data.max_response_length",
    "group_size": "actor_rollout_ref.rollout.n",
    "num_samples": "actor_rollout_ref.rollout.n",
    "beta": f"{_ACTOR}.kl_loss_coef (with use_kl_loss=True; of preferences dpo.beta)",
    "lora": "actor_rollout_ref.model.lora_rank",
    "lora_r": "actor_rollout_ref.model.lora_rank",
    "seed": "trainer.seed",
    "gpus": "trainer.n_gpus_per_node",
    "num_gpus": "trainer.n_gpus_per_node",
    "wandb": "trainer.logger",
}
"""Usual names, many of them TRL's, and the ones that mean it here, for messages: docs/guide/from-trl.md says what
differs."""

_PROMPTS_PER_STEP = "data.train_batch_size (prompts per step, as there)"
_MINI_BATCH = f"{_ACTOR}.ppo_mini_batch_size (prompts per optimizer step; there responses)"
_FUNCTION = "reward (a Python function, or a reward model's path)"
_AGENT = "actor_rollout_ref.rollout.agent.environment"
_OPENRLHF_NAMES: dict[tuple[str, ...], str] = {
    ("actor.model_name_or_path", "pretrain"): "model",
    ("reward.model_name_or_path", "reward_pretrain"): "reward_model.model.path (with reward_model.enable=True)",
    ("critic.model_name_or_path", "critic_pretrain"): "critic.model.path",
    ("reward.remote_url", "remote_rm_url"): _FUNCTION,
    ("train.agent_func_path", "agent_func_path"): f"{_AGENT} (a class with reset and step)",
    ("data.prompt_dataset", "prompt_data"): "data",
    ("data.input_key", "input_key"): "data.prompt_key",
    ("data.max_len", "max_len"): "data.max_response_length (and data.max_prompt_length: not their sum)",
    ("rollout.max_new_tokens", "generate_max_len"): "data.max_response_length",
    ("prompt_max_len",): "data.max_prompt_length",
    ("rollout.batch_size", "rollout_batch_size"): _PROMPTS_PER_STEP,
    ("rollout.n_samples_per_prompt", "n_samples_per_prompt"): "actor_rollout_ref.rollout.n",
    ("train.batch_size",): _MINI_BATCH,
    ("train.micro_batch_size", "micro_train_batch_size"): f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    ("train.max_tokens_per_gpu", "train_max_tokens_per_gpu"): f"{_ACTOR}.ppo_max_token_len_per_gpu",
    ("train.dynamic_batch_enable", "use_dynamic_batch"): f"{_ACTOR}.use_dynamic_bsz",
    ("train.max_epochs", "max_epochs"): f"{_ACTOR}.ppo_epochs (without RL trainer.total_epochs)",
    ("train.num_episodes", "num_episodes"): "trainer.total_epochs",
    ("actor.adam.lr", "actor_learning_rate"): "lr",
    ("critic.adam.lr", "critic_learning_rate"): "critic.optim.lr",
    ("algo.advantage.estimator", "advantage_estimator"): "algorithm.adv_estimator (other names of the same)",
    ("algo.kl.init_coef", "init_kl_coef"): f"{_ACTOR}.kl_loss_coef (in the reward algorithm.kl_ctrl.kl_coef)",
    ("algo.kl.estimator", "kl_estimator"): f"{_ACTOR}.kl_loss_type (in the reward algorithm.kl_penalty)",
    ("algo.dynamic_filtering_enable", "dynamic_filtering"): "algorithm.filter_groups.enable",
    ("train.async_enable", "async_train"): "async_training.mode",
    ("train.colocate_all", "colocate_all_models"): "actor_rollout_ref.hybrid_engine (True by default)",
    ("vllm.num_engines", "vllm_num_engines"): "engine (engine=vllm: one per device, or per tensor-parallel group)",
    ("vllm.tensor_parallel_size", "vllm_tensor_parallel_size"): "actor_rollout_ref.rollout.tensor_model_parallel_size",
    ("vllm.gpu_memory_utilization",): "actor_rollout_ref.rollout.gpu_memory_utilization",
    ("ds.zero_stage", "zero_stage"): f"{_ACTOR}.strategy",
    ("ds.packing_samples", "packing_samples"): "actor_rollout_ref.model.use_remove_padding (True by default)",
    ("ds.ring_attn_size", "ring_attn_size"): f"{_ACTOR}.ulysses_sequence_parallel_size",
    ("ds.lora.rank",): "actor_rollout_ref.model.lora_rank",
    ("ckpt.path", "ckpt_path"): "output",
    ("ckpt.output_dir", "save_path"): "output (the run folder; dovetail export writes the model)",
    ("ckpt.save_steps",): "trainer.save_freq",
    ("ckpt.load_enable", "load_checkpoint"): "trainer.resume_mode (auto by default)",
}
OPENRLHF_NAMES = {name: here for names, here in _OPENRLHF_NAMES.items() for name in names}
"""Flags of OpenRLHF, as they are and as they were before they had sections, for messages."""


def usual_name(name: str) -> str | None:
    """The end of a sentence about a name that another library has for one of ours."""
    for names, page in ((USUAL_NAMES, "from-trl"), (OPENRLHF_NAMES, "from-openrlhf")):
        if (here := names.get(name)) is not None:
            return f"; that is {here} here (docs/guide/{page}.md has more names)."
    return None


def expand(name: str, value: Any) -> dict[str, Any] | None:
    """The keys that a short name, or the name of one of verl's files, sets; None when `name` is none, or is used as a
    section (`data: {...}`)."""
    if (chosen := chosen_file(name, value)) is not None:
        return chosen
    if name not in SHORT_NAMES or isinstance(value, Mapping):
        return None
    if value is None:
        return {}
    return _reward_keys(value) if name == "reward" else {SHORT_NAMES[name][0]: value}


def reward_entry(text: str) -> dict[str, Any]:
    """One entry of `reward_model.reward_kwargs.rewards`. A built-in rule is a function too: it then needs no
    `data_source` in the rows."""
    path, name = split_address(text)
    if path.endswith((".py", ".pkl")) or path.startswith("pkg://"):
        return {"path": path, "name": name or "compute_score"}
    return {"path": "pkg://dovetail.rewards.registry", "name": "score_by_rule", "kwargs": {"rule": text}}


def _reward_keys(value: Any) -> dict[str, Any]:
    if isinstance(value, list | tuple):
        return {"reward_model.reward_kwargs.rewards": [reward_entry(str(each)) for each in value]}
    text = str(value)
    is_function = text.startswith("pkg://") or ".py" in text or ".pkl" in text
    if not is_function and ("/" in text or (Path(text) / "config.json").is_file()):
        return {"reward_model.enable": True, "reward_model.model.path": text}
    entry = reward_entry(text)
    keys = {"path": entry["path"], "name": entry["name"], "reward_kwargs": entry.get("kwargs")}
    return {f"custom_reward_function.{name}": setting for name, setting in keys.items() if setting is not None}
