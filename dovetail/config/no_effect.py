"""Keys that other systems use and that change nothing here, each with its reason. Using one prints a notice."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class NoEffect:
    """Keys that match `pattern` (`*` stands for anything) do nothing, because of `reason`.

    `harmless` lists the values that ask for what happens anyway; any other would change the algorithm, and is refused.
    """

    pattern: str
    reason: str
    harmless: tuple[object, ...] | None = None

    def refuses(self, value: object) -> bool:
        return self.harmless is not None and value is not None and value not in self.harmless


_ROLLOUT = "actor_rollout_ref.rollout"
_SEEDED = "`trainer.seed` seeds every role"
_LAUNCHER = "it belongs to another launcher; here every default is in the schema"
_NO_PROFILER = "`global_profiler` chooses tool (torch), steps and ranks for all roles; phases are in metrics.jsonl"
_BRIDGE = "weights are always converted between Hugging Face and Megatron names by dovetail itself"
_ROUTING = "the trainer routes tokens to experts itself; routing is not recorded or replayed"
_ENGINE_REWARD = "reward networks are computed by the training backend; no engine is started for them"
_MTP = "multi-token-prediction heads are neither trained nor used to generate"
_MUON = "Muon of strategy=fsdp2 has muon_momentum, muon_nesterov, muon_num_ns_steps and muon_adjust_lr_fn"
_ADAPTERS = "adapters are plain LoRA, initialised as PEFT does"
_ALWAYS = "it is always so"
_OFF = (False,)
_NO_REPLAY = "answers are never replayed from an earlier run"

NO_EFFECT: tuple[NoEffect, ...] = (
    NoEffect("hydra.*", _LAUNCHER),
    NoEffect("defaults", _LAUNCHER),
    *(
        NoEffect(f"global_profiler.{name}", _NO_PROFILER)
        for name in ("_target_", "profile_continuous_steps", "relocate_results", "finish_hook_*", "global_tool_config*")
    ),
    NoEffect("profiler.*", _NO_PROFILER),
    NoEffect("trainer.npu_profile.*", _NO_PROFILER),
    NoEffect("trainer.controller_nsight_options.*", _NO_PROFILER),
    NoEffect("trainer.worker_nsight_options.*", _NO_PROFILER),
    NoEffect("*.profiler.*", _NO_PROFILER),
    NoEffect("*.profile.*", _NO_PROFILER),
    NoEffect("transfer_queue.*", "batches travel through Ray's object store"),
    NoEffect("data.use_shm", "data files are read where they are"),
    NoEffect("data.datagen.path", "prompts are not generated during training; write them to a file first", ()),
    NoEffect("data.datagen.*", "prompts are not generated during training; write them to a file first"),
    NoEffect("data.need_tools_kwargs", "tool arguments are kept whenever a row has them"),
    NoEffect("data.filter_prompts", "`data.filter_overlong_prompts` decides"),
    NoEffect("*.model.use_liger", "dovetail has its own fused head; other Liger kernels are not used"),
    NoEffect("*.model.tiled_mlp.*", "feed-forward layers are not tiled; use gradient checkpointing or a longer SP"),
    NoEffect("*.model.mtp.enable", _MTP, _OFF),
    NoEffect("*.model.mtp.enable_train", _MTP, _OFF),
    NoEffect("*.model.mtp.*", _MTP),
    NoEffect(f"{_ROLLOUT}.mtp.*", _MTP),
    NoEffect("*.model.gradient_checkpointing_kwargs.*", "gradient checkpointing has one, non-reentrant, form"),
    NoEffect("*.model.torch_dtype", "`fsdp_config.model_dtype` is the dtype of the weights"),
    NoEffect("*.model.lora.type", _ADAPTERS, ("lora", "canonical_lora")),
    NoEffect("*.model.lora.*", _ADAPTERS),
    NoEffect("*.fsdp_config.use_orig_params", "FSDP2 always keeps the original parameters, and fsdp is told to"),
    NoEffect("*.fsdp_config.forward_only", "the role decides: reference and reward model are forward only"),
    NoEffect("*.fsdp_config.seed", _SEEDED),
    NoEffect("*.fsdp_config.entropy_*", "only the actor computes an entropy"),
    NoEffect("*.fsdp_config.use_torch_compile", "only the actor's and the reference's heads are compiled"),
    NoEffect("*.fsdp_config.cpu_offload", "use `param_offload`, or `offload_policy` with fsdp2"),
    NoEffect("*.fsdp_config.grad_offload", "gradients live only during an update"),
    NoEffect("*.megatron.seed", _SEEDED),
    NoEffect("*.megatron.use_mbridge", _BRIDGE),
    NoEffect("*.megatron.vanilla_mbridge", _BRIDGE),
    NoEffect("*.megatron.use_remove_padding", "`model.use_remove_padding` decides for every backend"),
    NoEffect("*.megatron.forward_only", "the role decides"),
    NoEffect("*.megatron.extra.*", "use `override_transformer_config`"),
    NoEffect("*.megatron.use_megatron_fsdp", "Megatron's own FSDP is not used; choose strategy fsdp2"),
    NoEffect("*.optim.optimizer_impl", "optimizers come from torch.optim"),
    NoEffect("*.optim.weight_decay_incr_style", "weight decay is constant", ("constant",)),
    NoEffect("*.optim.use_checkpoint_opt_param_scheduler", "a resumed run always continues its schedule"),
    NoEffect("*.optim.zero_indexed_step", "the first step is step 1 of the schedule"),
    NoEffect("*.rollout_n", f"`{_ROLLOUT}.n` is the one place"),
    NoEffect("*.data_loader_seed", _SEEDED),
    NoEffect("*.load_weight", "weights are always loaded from `model.path`", (True,)),
    NoEffect("actor_rollout_ref.actor.use_prefix_grouper", "equal prompts are not merged; results are the same"),
    NoEffect("actor_rollout_ref.actor.sum_pi_squared_checkpointing", "it is computed without gradients, in chunks"),
    NoEffect("*.router_replay.mode", _ROUTING, ("disabled",)),
    NoEffect("actor_rollout_ref.actor.router_replay.*", _ROUTING),
    NoEffect("actor_rollout_ref.ref.router_replay.*", _ROUTING),
    NoEffect(f"{_ROLLOUT}.enable_rollout_routing_replay", _ROUTING, _OFF),
    NoEffect("actor_rollout_ref.ref.entropy_*", "only the actor computes an entropy"),
    NoEffect("actor_rollout_ref.ref.use_fused_kernels", "`actor_rollout_ref.model.use_fused_kernels` decides"),
    NoEffect("actor_rollout_ref.ref.model.*", "the reference is the policy's starting point"),
    NoEffect("*.veomni.*", "there is no such backend; choose fsdp2 or megatron"),
    NoEffect("*.veomni_config.*", "there is no such backend; choose fsdp2 or megatron"),
    NoEffect("*.torchtitan.*", "there is no such backend; choose fsdp2 or megatron"),
    NoEffect("*.fsdp_config.turbo_config.*", "there is no such backend; choose fsdp2 or megatron"),
    NoEffect("*.checkpoint.strict", "a checkpoint that does not fit the model is always refused"),
    NoEffect("actor_rollout_ref.ref.optim.*", "the reference is not trained"),
    NoEffect("*.optim.muon_split_qkv", _MUON, (True,)),
    NoEffect("*.optim.muon_scale_mode", _MUON, ("spectral",)),
    NoEffect("*.optim.muon_coefficient_type", _MUON, ("quintic",)),
    NoEffect("*.optim.muon_extra_scale_factor", _MUON, (1.0,)),
    NoEffect("*.optim.muon_scalar_optimizer", _MUON, ("adam",)),
    NoEffect("*.optim.muon_match_adamw_update_rms", "`muon_adjust_lr_fn=match_rms_adamw` does that", _OFF),
    NoEffect("*.optim.muon_tp_mode", _MUON),
    NoEffect("*.optim.muon_fp32_matmul_prec", _MUON),
    NoEffect("*.optim.use_layer_wise_distributed_optimizer", _MUON),
    NoEffect("*.optim.use_precision_aware_optimizer", "write it in `override_optimizer_config`"),
    NoEffect("*.optim.*_dtype", "write it in `override_optimizer_config`"),
    NoEffect("*.megatron.dynamic_context_parallel", "`context_parallel_size` holds for every batch"),
    NoEffect("*.megatron.max_seqlen_per_dp_cp_rank", "`context_parallel_size` holds for every batch"),
    NoEffect("*.megatron.dist*_optim_*", "checkpoints can always be loaded by another number of devices"),
    NoEffect("*.megatron.router_replay.*", _ROUTING),
    NoEffect("*.megatron.entropy_*", "the keys of the role decide for every backend"),
    NoEffect("*.mindspeed.*", "there is no Ascend backend"),
    NoEffect("*.pad_to_length*", "sequences are packed, or padded to the longest of the micro-batch"),
    NoEffect("*.entropy_from_logits_chunk_size", "the chunk size follows from the vocabulary"),
    NoEffect("*.function_tool_path", "tools are described by `multi_turn.tool_config_path`"),
    NoEffect(f"{_ROLLOUT}.moe_load_balance_metrics_interval", "the engine's expert load is not recorded"),
    NoEffect(f"{_ROLLOUT}.moe_tensor_parallel_size", f"pass it through `{_ROLLOUT}.engine_kwargs`"),
    NoEffect(f"{_ROLLOUT}.disaggregation.*", "one engine does prefill and decoding"),
    NoEffect(f"{_ROLLOUT}.standalone_gpu_memory_utilization", f"`{_ROLLOUT}.gpu_memory_utilization` decides"),
    NoEffect("async_training.dynamic_schedule_*", "devices keep their role for the whole run"),
    NoEffect("async_training.use_dynamic_resource_scheduling", "devices keep their role for the whole run"),
    NoEffect("async_training.concurrent_samples_per_replica", "the engine schedules its own requests"),
    NoEffect("async_training.enable_reward_queue", "scores are always computed asynchronously"),
    NoEffect("distillation.enabled", "there is no distillation from a teacher", _OFF),
    NoEffect("distillation.*", "there is no distillation from a teacher"),
    NoEffect("data.audio_key", "prompts hold text, images and videos"),
    NoEffect("data.mm_processor_kwargs*", "the processor runs with the model's own settings"),
    NoEffect("critic.loss_scale_factor", "`actor_rollout_ref.actor.loss_scale_factor` is that of both losses", ()),
    NoEffect("trainer.use_v1", "there is one trainer"),
    NoEffect("trainer.v1.*", "there is one trainer; `async_training` holds what runs ahead"),
    NoEffect("algorithm.filter_groups.max_inflight_gen_batches", "generation batches run one after the other"),
    NoEffect("*.megatron.pad_*", "sequences are packed, or padded to the longest of the micro-batch"),
    NoEffect("*.checkpoint.mbridge_config*", _BRIDGE),
    NoEffect("*.qat.enable", "weights are trained in full precision; only the engine may be quantised", _OFF),
    NoEffect("*.qat.*", "weights are trained in full precision; only the engine may be quantised"),
    NoEffect("skip.enable", _NO_REPLAY, _OFF),
    NoEffect("skip.*", _NO_REPLAY),
    NoEffect(f"{_ROLLOUT}.single_turn_response_length", "turns share `data.max_response_length`"),
    NoEffect("data.min_response_length", "a response ends where the model ends it", (0,)),
    NoEffect(f"{_ROLLOUT}.enable_sleep_mode", f"`{_ROLLOUT}.free_cache_engine` decides"),
    NoEffect("*.use_gemm_fusion", "`model.use_fused_kernels` is the fused head"),
    NoEffect(f"{_ROLLOUT}.layered_summon", "weights always travel in buckets, never as a whole model"),
    NoEffect(f"{_ROLLOUT}.layer_name_map.*", "weights travel under their Hugging Face names"),
    NoEffect(f"{_ROLLOUT}.multi_stage_wake_up", "the engine always wakes its weights first and its cache last"),
    NoEffect(f"{_ROLLOUT}.over_sample_rate", "every started answer is finished and used"),
    NoEffect(f"{_ROLLOUT}.prometheus.*", "metrics go to the run folder and the trackers"),
    NoEffect(f"{_ROLLOUT}.trace.*", "answers are recorded by `trainer.rollout_data_dir`"),
    NoEffect(f"{_ROLLOUT}.skip_rollout", _NO_REPLAY, _OFF),
    NoEffect(f"{_ROLLOUT}.skip_dump_dir", _NO_REPLAY),
    NoEffect(f"{_ROLLOUT}.skip.enable", _NO_REPLAY, _OFF),
    NoEffect(f"{_ROLLOUT}.skip.*", _NO_REPLAY),
    NoEffect(f"{_ROLLOUT}.skip_use_default_dir", _NO_REPLAY),
    NoEffect(f"{_ROLLOUT}.checkpoint_engine.*", f"`{_ROLLOUT}.weight_sync` chooses the transfer"),
    NoEffect("actor_rollout_ref.checkpoint_engine.*", f"`{_ROLLOUT}.weight_sync` chooses the transfer"),
    NoEffect("async_training.checkpoint_engine.*", f"`{_ROLLOUT}.weight_sync` chooses the transfer"),
    NoEffect(f"{_ROLLOUT}.quantization_config_file", f"pass quantisation through `{_ROLLOUT}.engine_kwargs`"),
    NoEffect(f"{_ROLLOUT}.engine_kwargs.trtllm.*", "TensorRT-LLM is not an engine here; use native, vllm or sglang"),
    NoEffect(f"{_ROLLOUT}.server.*", "time-outs and retries of the engine's server are dovetail's own"),
    NoEffect(f"{_ROLLOUT}.use_fire_sampling", "the first token is sampled like the others", _OFF),
    NoEffect(f"{_ROLLOUT}.micro_batch_size", "the engine forms its own batches"),
    NoEffect(f"{_ROLLOUT}.chat_scheduler", f"`{_ROLLOUT}.agent` drives conversations"),
    NoEffect(f"{_ROLLOUT}.disable_log_requests", "engines never log requests"),
    NoEffect(f"{_ROLLOUT}.enable_memory_saver", f"`{_ROLLOUT}.free_cache_engine` decides"),
    NoEffect(f"{_ROLLOUT}.multi_turn.tokenization_sanity_check_mode", "token ids are kept and never re-tokenised"),
    NoEffect(f"{_ROLLOUT}.multi_turn.enable_tokenization_sanity_check", "token ids are kept and never re-tokenised"),
    NoEffect(f"{_ROLLOUT}.multi_turn.completion_callback", f"`{_ROLLOUT}.agent` drives conversations"),
    NoEffect(f"{_ROLLOUT}.agent.custom_async_server.*", "engines are chosen by `rollout.name`"),
    NoEffect(f"{_ROLLOUT}.agent.agent_loop_manager_class", "conversations are driven by the built-in manager"),
    NoEffect("reward_model.use_reward_loop", f"scores are always computed asynchronously: {_ALWAYS}"),
    NoEffect("reward_model.launch_reward_fn_async", f"scores are always computed asynchronously: {_ALWAYS}"),
    NoEffect("reward_model.reward_loop_source", "a module path is enough to find a manager"),
    NoEffect("reward_model.reward_manager.source", "a module path is enough to find a manager"),
    NoEffect("reward_model.rollout.*", _ENGINE_REWARD),
    NoEffect("reward_model.model.use_fused_kernels", "a reward network has no vocabulary head"),
    NoEffect("reward_model.model.enable_gradient_checkpointing", "a reward network has no backward pass"),
    NoEffect("reward_model.model.megatron.*", "parallelism is in `reward_model.megatron`"),
    NoEffect("trainer.use_legacy_worker_impl", "there is one implementation of each role"),
    NoEffect("trainer.esi_redundant_time", "checkpoints follow `trainer.save_freq` only"),
    NoEffect("trainer.ray_wait_register_center_timeout", "workers are found without a register centre"),
    NoEffect("trainer.default_hdfs_dir", "checkpoints stay in the run folder; mount or copy it"),
    NoEffect("trainer.del_local_ckpt_after_load", "checkpoints are never deleted by loading them"),
    NoEffect("trainer.remove_previous_ckpt_in_save", "`trainer.max_actor_ckpt_to_keep` decides"),
    NoEffect("trainer.dump_high_diff_*", "`rollout_corr/probs_diff_*` metrics report the gap"),
    NoEffect("trainer.tensorboard_dir", "trackers write below the run folder"),
    NoEffect("trainer.rl_logging_board_dir", "`trainer.rollout_data_dir` records the answers"),
    NoEffect("trainer.num_global_batch", "batches travel through Ray's object store"),
    NoEffect("trainer.num_data_*", "batches travel through Ray's object store"),
    NoEffect("trainer.wandb_proxy", "set HTTPS_PROXY in the environment"),
    NoEffect("trainer.scheduler", "`actor_rollout_ref.hybrid_engine` decides who generates where"),
)


_NO_OPTIMIZER = "the role has no optimizer"
# Keys of a section that roles share and that this role does not use.
UNUSED_BY_ROLE: dict[str, str] = {
    "actor_rollout_ref.ref.fsdp_config.optimizer_offload": _NO_OPTIMIZER,
    "actor_rollout_ref.ref.megatron.optimizer_offload": _NO_OPTIMIZER,
    "actor_rollout_ref.ref.megatron.grad_offload": _NO_OPTIMIZER,
    "actor_rollout_ref.ref.megatron.use_distributed_optimizer": _NO_OPTIMIZER,
    "reward_model.model.fsdp_config.optimizer_offload": _NO_OPTIMIZER,
    "reward_model.megatron.optimizer_offload": _NO_OPTIMIZER,
    "reward_model.megatron.grad_offload": _NO_OPTIMIZER,
    "reward_model.megatron.use_distributed_optimizer": _NO_OPTIMIZER,
    "critic.model.use_fused_kernels": "a value network has no vocabulary head",
    "critic.model.fused_kernel_options.impl_backend": "a value network has no vocabulary head",
    "critic.model.lora_merge": "only the policy's weights go to the engine",
    "critic.model.custom_chat_template": "only the policy's tokenizer renders prompts",
}


def no_effect(key: str) -> NoEffect | None:
    """The entry of the table for `key`, if it is in it."""
    return next((entry for entry in NO_EFFECT if _matches(entry.pattern, key)), None)


def _matches(pattern: str, key: str) -> bool:
    # `section.*` covers the section itself, written as one mapping or null.
    return fnmatchcase(key, pattern) or (pattern.endswith(".*") and fnmatchcase(key, pattern[:-2]))
