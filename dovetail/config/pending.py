"""Keys that are accepted and planned with, and that no part of this version acts on, each with what happens instead.

Setting one to something else than what happens anyway prints a notice. What would make a run wrong when passed over is
refused at its start as well: `dovetail.config.runnable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dovetail.config.errors import Notice
from dovetail.config.fsdp import full_dtype
from dovetail.config.keys import find_key
from dovetail.config.root import DovetailConfig


@dataclass(frozen=True)
class Pending:
    """Keys that match `pattern` (`*` stands for anything) are not acted on; `instead` happens.

    `when` limits this to some runs, `fulfilled` names values that are what happens anyway.
    """

    pattern: str
    instead: str
    when: Callable[[DovetailConfig], bool] | None = None
    fulfilled: Callable[[Any], bool] | None = None


def pending_notices(config: DovetailConfig, values: Mapping[str, Any], *, told: set[str]) -> list[Notice]:
    """One notice for each reason, over the set keys `values`. Keys in `told` have a message of their own."""
    found: dict[str, list[str]] = {}
    for key, value in values.items():
        entry = pending(key)
        if entry is None or key in told or changes_nothing(key, value) or (entry.when and not entry.when(config)):
            continue
        if entry.fulfilled is None or not entry.fulfilled(value):
            found.setdefault(entry.instead, []).append(f"{key}={value}")
    return [
        Notice(keys[0].partition("=")[0], f"{', '.join(keys)}: not acted on in this version: {instead}.")
        for instead, keys in found.items()
    ]


def pending(key: str) -> Pending | None:
    """The entry of the table for `key`, if it is in it."""
    return next((entry for entry in PENDING if fnmatchcase(key, entry.pattern)), None)


def changes_nothing(key: str, value: Any) -> bool:
    """Whether the value is the default: a file that resolves a whole run writes every key."""
    known = find_key(DovetailConfig, key)
    if value is None or known is None or (known.name == key and value == known.default):
        return True
    # `fp32` and `float32` are one dtype.
    return isinstance(value, str) and isinstance(known.default, str) and full_dtype(value) == full_dtype(known.default)


def _native(config: DovetailConfig) -> bool:
    return config.actor_rollout_ref.rollout.name == "native"


def _native_on_cpu(config: DovetailConfig) -> bool:
    return _native(config) and config.trainer.device == "cpu"


def _shared_devices(config: DovetailConfig) -> bool:
    return config.actor_rollout_ref.hybrid_engine


def _no_megatron(config: DovetailConfig) -> bool:
    policy = config.actor_rollout_ref
    strategies = {policy.actor.strategy, policy.ref.strategy, config.critic.strategy, config.reward_model.strategy}
    return "megatron" not in strategies


def _no_servers(config: DovetailConfig) -> bool:
    rollout = config.actor_rollout_ref.rollout
    return rollout.mode != "server" or not rollout.server_urls


def _not_sglang(config: DovetailConfig) -> bool:
    return config.actor_rollout_ref.rollout.name != "sglang"


def _no_sglang_server(config: DovetailConfig) -> bool:
    return _not_sglang(config) or not _no_servers(config) or config.actor_rollout_ref.rollout.mode != "server"


def _not(name: str, mode: str) -> Callable[[DovetailConfig], bool]:
    return lambda config: (config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.rollout.mode) != (name, mode)


_POLICY, _ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_TURNS = f"{_ROLLOUT}.multi_turn"

_CONFIG_JSON = "the plan reads it, a run reads the `config.json` beside the weights; use `model.override_config`"
_WHOLE_CRITIC = "the critic is trained whole, without adapters"
_ONE_TURN = "an answer is one turn"
_SHARED_DEVICES = "the engine runs on the trainer's devices, one engine in each process"
_REWARD_DEVICES = "the reward network runs on the trainer's devices"
_TAKE_TURNS = "generation and training take turns"
_NATIVE_ON_CPU = "the native engine reads it on CUDA only"
_NATIVE = "the native engine has no such setting; it is read by `rollout.name=vllm`"

_NO_SERVERS = "no server is used without `rollout.mode=server` and `rollout.server_urls`"

_NO_SGLANG_SERVER = "only `rollout.name=sglang` with mode=server and no server_urls starts servers"

_CUDA_SETTINGS = ("gpu_memory_utilization", "enforce_eager")
_ENGINE_SETTINGS = (
    *("cudagraph_capture_sizes", "enable_chunked_prefill"),
    *("enable_prefix_caching", "limit_images", "load_format", "scheduling_policy", "disable_log_stats"),
    *("skip_tokenizer_init", "update_weights_bucket_megabytes", "expert_parallel_size", "engine_kwargs.vllm*"),
    *("quantization", "logprobs_mode"),
)
_TURN_KEYS = (
    *("enable", "max_assistant_turns", "max_user_turns", "max_parallel_calls", "max_tool_response_length"),
    *("tool_response_truncate_side", "interaction_config_path", "use_inference_chat_template", "format"),
    "num_repeat_rollouts",
)

PENDING: tuple[Pending, ...] = (
    Pending("data.return_raw_input_ids", "the prompt's token ids are always in the batch, as `raw_prompt_ids`"),
    Pending("data.image_patch_size", "the processor of the model knows its patch size"),
    Pending("data.trust_remote_code", f"`{_POLICY}.trust_remote_code` decides for tokenizer and processor too"),
    Pending("*.model.use_shm", "every process reads the weights from the folder"),
    Pending("*.model.hf_config_path", _CONFIG_JSON),
    Pending(f"{_POLICY}.lora_adapter_path", "adapters start fresh"),
    Pending(
        f"{_POLICY}.lora_merge",
        "the engine gets merged weights; vllm with mode=sync on the trainer's devices takes adapters",
        when=lambda config: _not("vllm", "sync")(config) or not _shared_devices(config),
    ),
    Pending("critic.model.tokenizer_path", "the critic reads the policy's tokens"),
    Pending("critic.model.lora_*", _WHOLE_CRITIC),
    Pending("critic.model.target_modules", _WHOLE_CRITIC),
    Pending("critic.model.exclude_modules", _WHOLE_CRITIC),
    Pending("*.mixed_precision.buffer_dtype", "buffers keep the dtype the model gives them, rotary tables float32"),
    Pending("*.megatron.*", "it is read with `strategy=megatron` only", when=_no_megatron),
    Pending(f"{_ROLLOUT}.repetition_penalty", "no engine here applies it"),
    Pending(f"{_ROLLOUT}.calculate_log_probs", "the engine's log-probs are always kept", fulfilled=lambda value: True),
    *(Pending(f"{_TURNS}.{name}", _ONE_TURN) for name in _TURN_KEYS),
    Pending(f"{_ROLLOUT}.agent.*", _ONE_TURN),
    Pending(f"{_ROLLOUT}.n_gpus_per_node", _SHARED_DEVICES, when=_shared_devices),
    Pending(f"{_ROLLOUT}.data_parallel_size", _SHARED_DEVICES),
    Pending(
        f"{_ROLLOUT}.weight_sync",
        "weights go to the engine of the same process",
        when=lambda config: _no_servers(config) and _shared_devices(config),
        fulfilled=lambda value: value == "colocated",
    ),
    Pending(f"{_ROLLOUT}.weights_folder", _NO_SERVERS, when=_no_servers),
    Pending(f"{_ROLLOUT}.server_*", _NO_SERVERS, when=_no_servers),
    Pending(
        f"{_ROLLOUT}.mode", "the native engine takes the requests of a batch together in its own process", when=_native
    ),
    *(Pending(f"{_ROLLOUT}.{name}", _NATIVE, when=_native) for name in _ENGINE_SETTINGS),
    *(Pending(f"{_ROLLOUT}.{name}", _NATIVE_ON_CPU, when=_native_on_cpu) for name in _CUDA_SETTINGS),
    Pending(
        f"{_ROLLOUT}.restart_engine",
        "an engine in the trainer's own process ends with it; vllm with mode=async, sglang, and engines on devices of "
        "their own (`hybrid_engine=False`), are started again",
        when=lambda config: _shared_devices(config) and _not("vllm", "async")(config) and _not_sglang(config),
    ),
    Pending(f"{_ROLLOUT}.engine_kwargs.sglang*", "only `rollout.name=sglang` reads it", when=_not_sglang),
    Pending(f"{_ROLLOUT}.sglang_python", _NO_SGLANG_SERVER, when=_no_sglang_server),
    Pending(f"{_ROLLOUT}.num_servers", _NO_SGLANG_SERVER, when=_no_sglang_server),
    Pending(
        "reward_model.sandbox_fusion.max_concurrent",
        "without `sandbox_fusion.url` each of the `reward_model.num_workers` processes runs one program at a time",
        when=lambda config: config.reward_model.sandbox_fusion.url is None,
    ),
    Pending("reward_model.enable_resource_pool", _REWARD_DEVICES),
    Pending("reward_model.nnodes", _REWARD_DEVICES),
    Pending("reward_model.n_gpus_per_node", _REWARD_DEVICES),
    Pending(
        "algorithm.rollout_correction.loss_type",
        "without `bypass_mode` `actor_rollout_ref.actor.policy_loss.loss_mode` chooses the loss",
        when=lambda config: not config.algorithm.rollout_correction.bypass_mode,
    ),
    Pending(
        "trainer.max_critic_ckpt_to_keep",
        "a checkpoint holds actor and critic together, and `trainer.max_actor_ckpt_to_keep` counts it",
    ),
    Pending("async_training.*", _TAKE_TURNS),
    Pending(
        "global_profiler.tool",
        "only `torch` is built in; no profile is written",
        fulfilled=lambda value: value == "torch",
    ),
    Pending("ray_init.timeline_json_file", "Ray's timeline is not written; phases are timed in metrics.jsonl"),
)
