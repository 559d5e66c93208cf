"""Keys that other systems use and that do not exist here, each with its reason: the same rules as those of fields.

Most have no effect, which is a notice. A value that would change the algorithm is refused.
"""

from __future__ import annotations

from dovetail.config.base import Rule, unsupported, unused

_ROLLOUT = "actor_rollout_ref.rollout."
_MTP = "multi-token-prediction heads are neither trained nor used to generate"
_LORA = "adapters are plain LoRA, initialised as PEFT does"
_ROUTING = "the policy alone replays the experts of a mixture (`actor_rollout_ref.actor.router_replay.mode`)"
_MUON = "Muon of strategy=fsdp2 has muon_momentum, muon_nesterov, muon_num_ns_steps and muon_adjust_lr_fn"
_FULL_PRECISION = "weights are trained in full precision; only the engine may be quantised"
_NO_REPLAY = "no step takes its responses from a file; `dovetail replay` trains on all of a run that was recorded"

_STOP_STRINGS = "ROLLOUT.stop ROLLOUT.stop_strings ROLLOUT.stop_sequences"

# The reason, patterns of keys (`*` stands for anything, `ROLLOUT` for the section), values that ask for no more.
_REFUSED: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("prompts are not generated during training; write them to a file first", "data.datagen.path", ()),
    (_MTP, "*.model.mtp.enable *.model.mtp.enable_train", (False,)),
    (_LORA, "*.model.lora.type", ("lora", "canonical_lora")),
    ("weight decay is constant", "*.optim.weight_decay_incr_style", ("constant",)),
    ("weights are always loaded from `model.path`", "*.load_weight", (True,)),
    ("routing is kept with each batch, not in files", "*.router_replay.record_file *.router_replay.replay_file", ()),
    (_MUON, "*.optim.muon_split_qkv *.optim.muon_extra_scale_factor", (True,)),
    (_MUON, "*.optim.muon_scale_mode", ("spectral",)),
    (_MUON, "*.optim.muon_coefficient_type", ("quintic",)),
    (_MUON, "*.optim.muon_scalar_optimizer", ("adam",)),
    ("`muon_adjust_lr_fn=match_rms_adamw` does that", "*.optim.muon_match_adamw_update_rms", (False,)),
    ("`actor_rollout_ref.actor.loss_scale_factor` is that of both losses", "critic.loss_scale_factor", ()),
    (_FULL_PRECISION, "*.qat.enable", (False,)),
    (
        "no step takes its responses from a file; record a run with async_training.record=True, and `dovetail replay` "
        "trains on the record without an engine",
        "skip.*.enable ROLLOUT.skip_rollout ROLLOUT.skip.enable",
        (False,),
    ),
    ("groups are taken as `async_training.order` says", "trainer.v1.sampler.custom_sampler.path", ()),
    ("a response ends where the model ends it", "data.min_response_length ROLLOUT.min_tokens", (0,)),
    ("engines read no text; give ids of tokens in `rollout.stop_token_ids`", _STOP_STRINGS, (None, "", [])),
    (
        "rows are packed, or padded to the longest of the micro-batch, which changes no loss; use no_padding or right",
        "data.pad_mode",
        ("no_padding", "right"),
    ),
    (
        "no class for all conversations is run; name your agent loops in `rollout.agent.agent_loop_config_path`, or a "
        "program in `rollout.agent.command` (docs/agents.md)",
        "ROLLOUT.agent.agent_loop_manager_class ROLLOUT.chat_scheduler *.completion_callback",
        (),
    ),
    (
        "no class of a server is run; register an engine of yours (docs/guide/extending.md) and set `rollout.name`",
        "ROLLOUT.agent.custom_async_server.path",
        (),
    ),
    ("one engine does prefill and decoding", "ROLLOUT.disaggregation.enable*", (False,)),
    ("`dovetail generate MODEL --file PROMPTS --jsonl FILE` writes responses to a file", "data.output_path", ()),
    ("prompts hold text, images and videos; sound would be left out", "data.audio_key", ("audios",)),
    ("the reference is the policy's starting point", "actor_rollout_ref.ref.model.path", ()),
    ("optimizers come from torch.optim", "*.optim.optimizer_impl", ("torch.optim",)),
    (
        "`rollout.quantization` names the method, and `rollout.engine_kwargs` has the engine's own settings",
        "ROLLOUT.quantization_config_file",
        (),
    ),
    ("the first token is sampled like the others", "ROLLOUT.use_fire_sampling", (False,)),
)

_UNUSED: tuple[tuple[str, str], ...] = (
    ("it belongs to another launcher; here every default is in the schema", "hydra.*"),
    (
        "`global_profiler` has the tool, steps and ranks of all roles; phases are in metrics.jsonl",
        "global_profiler.profile_* global_profiler.relocate_* global_profiler.finish_hook_* global_profiler.global_* "
        "profiler.* *.profiler.* *.profile.* *.npu_profile.* *_nsight_options.*",
    ),
    ("batches travel through Ray's object store", "transfer_queue.* trainer.num_global_batch trainer.num_data_*"),
    ("data files are read where they are", "data.use_shm"),
    ("a row with messages is a conversation, whatever its turns", "data.multiturn.enable"),
    (
        "ids are those of inference; where a template rewrites history, another row begins",
        "*.ignore_input_ids_mismatch",
    ),
    ("prompts are not generated during training; write them to a file first", "data.datagen.*"),
    ("tool arguments are kept whenever a row has them", "data.need_tools_kwargs"),
    ("`data.filter_overlong_prompts` decides", "data.filter_prompts"),
    ("dovetail has its own fused head; other Liger kernels are not used", "*.model.use_liger"),
    ("feed-forward layers are not tiled; use gradient checkpointing or a longer SP", "*.model.tiled_mlp.*"),
    (_MTP, "*.model.mtp.* ROLLOUT.mtp.*"),
    ("gradient checkpointing has one, non-reentrant, form", "*.model.gradient_checkpointing_kwargs.*"),
    ("`fsdp_config.model_dtype` is the dtype of the weights", "*.model.torch_dtype"),
    (_LORA, "*.model.lora.*"),
    ("FSDP2 always keeps the original parameters, and fsdp is told to", "*.fsdp_config.use_orig_params"),
    ("the role decides: reference and reward model are forward only", "*.fsdp_config.forward_only"),
    ("`trainer.seed` seeds every role", "*.fsdp_config.seed *.megatron.seed *.data_loader_seed"),
    ("only the actor computes an entropy", "*.fsdp_config.entropy_* actor_rollout_ref.ref.entropy_*"),
    ("only the actor's and the reference's heads are compiled", "*.fsdp_config.use_torch_compile"),
    ("use `param_offload`, or `offload_policy` with fsdp2", "*.fsdp_config.cpu_offload"),
    ("gradients live only during an update", "*.fsdp_config.grad_offload"),
    ("dovetail itself converts between Hugging Face and Megatron names", "*mbridge*"),
    (
        "`model.use_remove_padding` decides for every backend",
        "*.megatron.use_remove_padding *.fsdp_config.use_remove_padding",
    ),
    ("the role decides", "*.megatron.forward_only"),
    ("use `override_transformer_config`", "*.megatron.extra.*"),
    ("Megatron's own FSDP is not used; choose strategy fsdp2", "*.megatron.use_megatron_fsdp"),
    ("a resumed run always continues its schedule", "*.optim.use_checkpoint_opt_param_scheduler"),
    ("the first step is step 1 of the schedule", "*.optim.zero_indexed_step"),
    ("`actor_rollout_ref.rollout.n` is the one place", "*.rollout_n"),
    ("it is computed without gradients, in chunks", "actor_rollout_ref.actor.sum_pi_squared_checkpointing"),
    (_ROUTING, "actor_rollout_ref.ref.*router_replay.* critic.*router_replay.*"),
    ("`actor_rollout_ref.model.use_fused_kernels` decides", "actor_rollout_ref.ref.use_fused_kernels"),
    ("the reference is the policy's starting point", "actor_rollout_ref.ref.model.*"),
    ("there is no such backend; choose fsdp2 or megatron", "*.veomni* *.torchtitan.* *.turbo_config.*"),
    ("a checkpoint that does not fit the model is always refused", "*.checkpoint.strict"),
    ("the reference is not trained", "actor_rollout_ref.ref.optim.*"),
    (_MUON, "*.optim.muon_tp_mode *.optim.muon_fp32_matmul_prec *.optim.use_layer_wise_distributed_optimizer"),
    ("write it in `override_optimizer_config`", "*.optim.use_precision_aware_optimizer *.optim.*_dtype"),
    ("`context_parallel_size` holds for every batch", "*.dynamic_context_parallel *.max_seqlen_per_dp_cp_rank"),
    ("checkpoints can always be loaded by another number of devices", "*.megatron.dist*_optim_*"),
    ("the keys of the role decide for every backend", "*.megatron.entropy_*"),
    ("there is no Ascend backend", "*.mindspeed.*"),
    ("sequences are packed, or padded to the longest of the micro-batch", "*.pad_to_length* *.megatron.pad_*"),
    ("the chunk size follows from the vocabulary", "*.entropy_from_logits_chunk_size"),
    ("`rollout.multi_turn.function_tool_path` names the file", "data.function_tool_path"),
    ("the engine's expert load is not recorded", "ROLLOUT.moe_load_balance_metrics_interval"),
    ("pass it through `actor_rollout_ref.rollout.engine_kwargs`", "ROLLOUT.moe_tensor_parallel_size"),
    ("one engine does prefill and decoding", "ROLLOUT.disaggregation.*"),
    ("`actor_rollout_ref.rollout.gpu_memory_utilization` decides", "ROLLOUT.standalone_gpu_memory_utilization"),
    ("devices keep their role for the whole run", "async_training.*dynamic_*"),
    ("the engine schedules its own requests", "async_training.concurrent_samples_per_replica"),
    ("scores are always asynchronous", "*.use_reward_loop *.launch_reward_fn_async *.enable_reward_queue"),
    ("`distillation.enabled=True` reads it", "distillation.*"),
    (
        "checkpoints hold the base model too; `dovetail export --adapter` writes the adapter alone, and "
        "`trainer.max_actor_ckpt_to_keep` limits how many are kept",
        "*.checkpoint.save_lora_only",
    ),
    ("there is one trainer", "trainer.use_v1"),
    ("there is one trainer; `async_training` says how far generation runs ahead", "trainer.v1.*"),
    ("validation runs on the engines", "async_training.use_trainer_do_validate"),
    ("generation batches run one after the other", "algorithm.filter_groups.max_inflight_gen_batches"),
    (_FULL_PRECISION, "*.qat.*"),
    (_NO_REPLAY, "skip.* ROLLOUT.skip_dump_dir ROLLOUT.skip.* ROLLOUT.skip_use_default_dir"),
    ("turns share `data.max_response_length`", "ROLLOUT.single_turn_response_length"),
    ("`actor_rollout_ref.rollout.free_cache_engine` decides", "ROLLOUT.enable_sleep_mode ROLLOUT.enable_memory_saver"),
    ("`model.use_fused_kernels` is the fused head", "*.use_gemm_fusion"),
    ("weights always travel in buckets, never as a whole model", "ROLLOUT.layered_summon"),
    ("weights travel under their Hugging Face names", "ROLLOUT.layer_name_map.*"),
    ("the engine always wakes its weights first and its cache last", "ROLLOUT.multi_stage_wake_up"),
    ("every started response is finished and used", "ROLLOUT.over_sample_rate"),
    ("metrics go to the run folder and the trackers", "ROLLOUT.prometheus.*"),
    ("responses are recorded by `trainer.rollout_data_dir`", "ROLLOUT.trace.*"),
    ("`actor_rollout_ref.rollout.weight_sync` chooses the transfer", "*.checkpoint_engine.*"),
    ("TensorRT-LLM is not an engine here; use native, vllm or sglang", "ROLLOUT.engine_kwargs.trtllm.*"),
    ("time-outs and retries of the engine's server are dovetail's own", "ROLLOUT.server.*"),
    ("the engine forms its own batches", "ROLLOUT.micro_batch_size"),
    ("engines never log requests", "ROLLOUT.disable_log_requests"),
    ("token ids are kept and never re-tokenised", "*tokenization_sanity_check*"),
    ("engines are chosen by `rollout.name`", "ROLLOUT.agent.custom_async_server.*"),
    ("a module path is enough to find a manager", "reward_model.reward_loop_source reward_model.reward_manager.source"),
    ("reward networks are computed by the training backend; no engine is started for them", "reward_model.rollout.*"),
    ("a reward network has no vocabulary head", "reward_model.model.use_fused_kernels"),
    ("a reward network has no backward pass", "reward_model.model.enable_gradient_checkpointing"),
    ("parallelism is in `reward_model.megatron`", "reward_model.model.megatron.*"),
    ("there is one implementation of each role", "trainer.use_legacy_worker_impl"),
    ("checkpoints follow `trainer.save_freq` only", "trainer.esi_redundant_time"),
    ("workers are found without a register centre", "trainer.ray_wait_register_center_timeout"),
    ("checkpoints stay in the run folder; mount or copy it", "trainer.default_hdfs_dir"),
    ("checkpoints are never deleted by loading them", "trainer.del_local_ckpt_after_load"),
    ("`trainer.max_actor_ckpt_to_keep` decides", "trainer.remove_previous_ckpt_in_save"),
    ("`rollout_corr/probs_diff_*` metrics report the difference", "trainer.dump_high_diff_*"),
    ("trackers write below the run folder", "trainer.tensorboard_dir"),
    ("`trainer.rollout_data_dir` records the responses", "trainer.rl_logging_board_dir"),
    ("set HTTPS_PROXY in the environment", "trainer.wandb_proxy"),
    ("`actor_rollout_ref.hybrid_engine` decides who generates where", "trainer.scheduler"),
)


# A switch is asked before the section that it is in.
FOREIGN_KEYS: tuple[Rule, ...] = (
    *(unsupported(why, only=keys.replace("ROLLOUT.", _ROLLOUT), unless=harmless) for why, keys, harmless in _REFUSED),
    *(unused(why, only=keys.replace("ROLLOUT.", _ROLLOUT)) for why, keys in _UNUSED),
)


def foreign_key(key: str) -> Rule | None:
    """The rule for a key of another system, if it is one. `section.*` is the section itself too."""
    return next((rule for rule in FOREIGN_KEYS if rule.covers(key) or rule.covers(f"{key}.")), None)
