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
