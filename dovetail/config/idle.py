"""Keys that a run does not read because of what its other keys say, each with the reason. Setting one prints a notice.

What no run reads is in `dovetail.config.pending`. A combination that is likely a mistake has a check of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

from dovetail.config.errors import Notice, name_some
from dovetail.config.keys import catalogue
from dovetail.config.names import ADV_ESTIMATORS, POLICY_LOSSES
from dovetail.config.pending import changes_nothing, pending
from dovetail.config.root import DovetailConfig

When = Callable[[DovetailConfig], bool]


@dataclass(frozen=True)
class Idle:
    """Keys that match one of `patterns`, `but` for some, are not read while `when` holds.

    `unless` names values that ask for what happens anyway.
    """

    patterns: tuple[str, ...]
    when: When
    reason: str
    unless: tuple[Any, ...] = ()
    but: tuple[str, ...] = ()

    def concerns(self, config: DovetailConfig, key: str, value: Any) -> bool:
        matches = key not in self.but and any(fnmatchcase(key, pattern) for pattern in self.patterns)
        return matches and value not in self.unless and self.when(config)


def idle_notices(config: DovetailConfig, values: Mapping[str, Any], *, told: set[str]) -> list[Notice]:
    """One notice for each reason, over the set keys `values`. Keys in `told` have a message of their own."""
    found: dict[str, list[str]] = {}
    for key, value in values.items():
        if key in told or changes_nothing(key, value) or _is_pending(config, key):
            continue
        entry = next((entry for entry in IDLE if entry.concerns(config, key, value)), None)
        if entry is not None:
            found.setdefault(entry.reason, []).append(f"{key}={value}")
    return [
        Notice(keys[0].partition("=")[0], f"{name_some(keys)}: no effect in this run: {reason}.")
        for reason, keys in found.items()
    ]


def is_unread(config: DovetailConfig, key: str) -> bool:
    """Whether this run does not read `key`, whatever its value: its part is off, or nothing acts on it."""
    if _is_pending(config, key) or any(entry.concerns(config, key, _ANY) for entry in IDLE):
        return True
    *parts, _ = key.split(".")
    above = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    # Without its network `reward_model` still says how answers are scored.
    return any(_is(f"{name}.enable", False)(config) for name in above if name in _SWITCHED and name != "reward_model")


_ANY = object()
_SWITCHED = frozenset(key.removesuffix(".enable") for key in catalogue(DovetailConfig) if key.endswith(".enable"))


def _is_pending(config: DovetailConfig, key: str) -> bool:
    entry = pending(key)
    return entry is not None and (entry.when is None or entry.when(config))


def _is(key: str, *values: Any) -> When:
    return lambda config: _value(config, key) in values


def _is_not(key: str, *values: Any) -> When:
    return lambda config: _value(config, key) not in values


def _value(config: DovetailConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _each(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


_ACTOR, _REF, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model"
_ROLLOUT, _CORRECTION = "actor_rollout_ref.rollout", "algorithm.rollout_correction"
_VAL = f"{_ROLLOUT}.val_kwargs"
_BUFFER = "reward_model.overlong_buffer"

# Which built-in losses and estimators read a key. One that a user registers may read any.
_CLIPPED = ("vanilla", "gspo", "cispo", "geo_mean", "clip_cov", "dppo_tv", "dppo_kl")
LOSSES_THAT_READ: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"), _CLIPPED),
    "clip_ratio_c": ("vanilla", "dppo_tv", "dppo_kl"),
    **dict.fromkeys(("tau_pos", "tau_neg"), ("sapo",)),
    **dict.fromkeys(_each("policy_loss", "clip_cov_ratio clip_cov_lb clip_cov_ub"), ("clip_cov",)),
    **dict.fromkeys(_each("policy_loss", "kl_cov_ratio ppo_kl_coef"), ("kl_cov",)),
    "policy_loss.dro_beta": ("dro",),
}
ESTIMATORS_THAT_READ: dict[str, tuple[str, ...]] = {
    "gamma": ("gae", "reinforce_plus_plus"),
    "lam": ("gae",),
    "norm_adv_by_std_in_grpo": ("grpo", "grpo_vectorized", "grpo_passk", "gdpo"),
    "gdpo_reward_weights": ("gdpo",),
}


def _of_other_losses() -> Iterator[Idle]:
    def other_loss(names: tuple[str, ...]) -> When:
        return lambda config: _loss_mode(config) in set(POLICY_LOSSES) - set(names)

    for key, names in LOSSES_THAT_READ.items():
        yield Idle((f"{_ACTOR}.{key}",), other_loss(names), f"loss_mode {' or '.join(names)} reads it")
    for key, names in ESTIMATORS_THAT_READ.items():
        others = set(ADV_ESTIMATORS) - set(names)
        reason = f"adv_estimator {' or '.join(names)} reads it"
        yield Idle((f"algorithm.{key}",), _is("algorithm.adv_estimator", *others), reason)


def _loss_mode(config: DovetailConfig) -> str:
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode and correction.loss_type == "reinforce":
        return "reinforce"
    return config.actor_rollout_ref.actor.policy_loss.loss_mode


def _of_other_backends() -> Iterator[Idle]:
    for role, sharding in (
        (_ACTOR, f"{_ACTOR}.fsdp_config"),
        (_REF, f"{_REF}.fsdp_config"),
        ("critic", "critic.fsdp_config"),
        ("reward_model", "reward_model.model.fsdp_config"),
    ):
        on_megatron = _is(f"{role}.strategy", "megatron")
        yield Idle((f"{sharding}.*",), on_megatron, f"{role}.strategy=megatron shards as {role}.megatron says")
        alone = "fsdp_size reshard_after_forward forward_prefetch wrap_policy.* mixed_precision.reduce_dtype"
        yield Idle(_each(sharding, alone), _is("trainer.world_size", 1), "one device holds the whole model")
        from_folder = _is(f"{role}.megatron.use_dist_checkpointing", False)
        reason = f"{role}.megatron.use_dist_checkpointing=True reads it"
        yield Idle((f"{role}.megatron.dist_checkpointing_*",), from_folder, reason)
    for role, model in ((_ACTOR, _MODEL), ("critic", "critic.model"), ("reward_model", "reward_model.model")):
        on_megatron = _is(f"{role}.strategy", "megatron")
        yield Idle((f"{model}.use_remove_padding",), on_megatron, "strategy=megatron always packs sequences")
        if role != "reward_model":  # which keeps no activations
            reason = "strategy=megatron reads override_transformer_config instead"
            yield Idle((f"{model}.enable_activation_offload",), on_megatron, reason)
    on_megatron = _is(f"{_ACTOR}.strategy", "megatron")
    yield Idle((f"{_ACTOR}.freeze_vision_tower",), on_megatron, "strategy=megatron trains models of text")
    reason = "the head of strategy=megatron keeps nothing for the entropy; model.use_fused_kernels=True goes in chunks"
    yield Idle(_each(_ACTOR, "entropy_from_logits_with_chunking entropy_checkpointing"), on_megatron, reason)


def _of_other_optimizers() -> Iterator[Idle]:
    for optim in (f"{_ACTOR}.optim", "critic.optim"):
        name, schedule = f"{optim}.optimizer", f"{optim}.lr_scheduler_type"
        yield Idle((f"{optim}.momentum",), _is_not(name, "SGD"), f"{name}=SGD reads it")
        yield Idle(_each(optim, "betas eps"), _is(name, "SGD"), f"{name}=SGD has none")
        yield Idle((f"{optim}.muon_*",), _is_not(name, "Muon"), f"{name}=Muon reads it")
        yield Idle((f"{optim}.lr_wsd_*",), _is_not(schedule, "wsd"), f"{schedule}=wsd reads it")
        yield Idle((f"{optim}.num_cycles",), _is_not(schedule, "cosine"), f"{schedule}=cosine reads it")
        decay = _each(optim, "min_lr min_lr_ratio lr_decay_steps")
        yield Idle(decay, _is(schedule, "constant"), f"{schedule}=constant does not decay")

        def no_warmup(config: DovetailConfig, optim: str = optim) -> bool:
            return _value(config, optim).warmup_steps(1_000_000) == 0

        yield Idle((f"{optim}.lr_warmup_init",), no_warmup, f"{optim}.lr_warmup_steps asks for no warm-up")


def _of_other_engines() -> Iterator[Idle]:
    def served(config: DovetailConfig) -> bool:
        return config.actor_rollout_ref.rollout.mode == "server" and bool(config.actor_rollout_ref.rollout.server_urls)

    started = _each(
        _ROLLOUT,
        "gpu_memory_utilization enforce_eager cudagraph_capture_sizes enable_chunked_prefill enable_prefix_caching "
        "max_num_batched_tokens max_num_seqs load_format scheduling_policy disable_log_stats skip_tokenizer_init "
        "free_cache_engine kv_cache_dtype expert_parallel_size engine_kwargs.*",
    )
    yield Idle(started, served, f"the servers of {_ROLLOUT}.server_urls run already, with settings of their own")
    of_vllm = _each(_ROLLOUT, "scheduling_policy limit_images engine_kwargs.vllm*")
    yield Idle(of_vllm, _is_not(f"{_ROLLOUT}.name", "vllm"), f"{_ROLLOUT}.name=vllm reads it")


# A reward network takes these from the critic's section where it has none of its own.
_FOR_REWARDS_TOO = _each("critic", "use_dynamic_bsz forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu")
_REWARD_NETWORK = _each(
    "reward_model",
    "model.* megatron.* strategy micro_batch_size_per_gpu use_dynamic_bsz max_length forward_max_token_len_per_gpu "
    "ulysses_sequence_parallel_size nccl_timeout",
)
_NO_CRITIC = "no critic is trained with this algorithm.adv_estimator"

IDLE: tuple[Idle, ...] = (
    Idle(("critic.*",), _is("uses_critic", False), _NO_CRITIC, but=("critic.enable", *_FOR_REWARDS_TOO)),
    Idle(_FOR_REWARDS_TOO, lambda config: not config.uses_critic and not config.reward_model.enable, _NO_CRITIC),
    Idle(
        (f"{_REF}.*",),
        _is("uses_reference", False),
        f"no reference is computed without {_ACTOR}.use_kl_loss or algorithm.use_kl_in_reward",
    ),
    Idle(
        _REWARD_NETWORK,
        _is("reward_model.enable", False),
        "no reward network is built without reward_model.enable=True",
    ),
    Idle(
        tuple(f"{role}.megatron.override_ddp_config.*" for role in (_REF, "reward_model")),
        lambda config: True,
        "the role has no gradients",
    ),
    *_of_other_backends(),
    *_of_other_losses(),
    *_of_other_optimizers(),
    *_of_other_engines(),
    Idle(
        (f"{_ACTOR}.min_num_micro_batch",),
        _is(f"{_ACTOR}.use_dynamic_bsz", False),
        f"{_ACTOR}.use_dynamic_bsz=True reads it",
    ),
    Idle(("critic.min_num_micro_batch",), _is("critic.use_dynamic_bsz", False), "critic.use_dynamic_bsz=True reads it"),
    Idle(
        ("global_profiler.save_path", "global_profiler.ranks", "global_profiler.all_ranks"),
        lambda config: not config.global_profiler.chosen_steps,
        "global_profiler.steps names none",
    ),
    Idle(
        (f"{_ACTOR}.loss_agg_mode",),
        lambda config: _loss_mode(config) in ("geo_mean", "sapo"),
        "this loss_mode has its own aggregation; the mode is that of the entropy and the KL alone",
    ),
    Idle(
        _each(_ACTOR, "kl_loss_coef kl_loss_type"),
        _is(f"{_ACTOR}.use_kl_loss", False),
        f"{_ACTOR}.use_kl_loss=True reads it",
        unless=(0,),
    ),
    Idle(
        ("algorithm.kl_penalty", "algorithm.kl_ctrl.*"),
        _is("algorithm.use_kl_in_reward", False),
        "algorithm.use_kl_in_reward=True reads it",
        unless=(0,),
    ),
    Idle(
        _each("algorithm.kl_ctrl", "horizon target_kl"),
        _is("algorithm.kl_ctrl.type", "fixed"),
        "algorithm.kl_ctrl.type=adaptive reads it",
    ),
    Idle(
        (f"{_CORRECTION}.rollout_is_*",),
        _is(f"{_CORRECTION}.rollout_is", None),
        f"{_CORRECTION}.rollout_is makes no weights",
    ),
    Idle(
        (f"{_CORRECTION}.rollout_rs_threshold",),
        _is(f"{_CORRECTION}.rollout_rs", None),
        f"{_CORRECTION}.rollout_rs names no rule",
    ),
    Idle(("algorithm.gdpo_reward_keys",), _is_not("algorithm.adv_estimator", "gdpo"), "adv_estimator gdpo reads it"),
    Idle(("algorithm.pf_ppo.*",), _is("algorithm.use_pf_ppo", False), "algorithm.use_pf_ppo=True reads it"),
    Idle(
        ("algorithm.pf_ppo.weight_pow",),
        _is_not("algorithm.pf_ppo.reweight_method", "pow"),
        "algorithm.pf_ppo.reweight_method=pow reads it",
    ),
    Idle(
        _each("algorithm.filter_groups", "metric max_num_gen_batches"),
        _is("algorithm.filter_groups.enable", False),
        "algorithm.filter_groups.enable=True reads it",
    ),
    Idle(
        (*_each(_BUFFER, "len penalty_factor log"), "reward_model.max_resp_len"),
        _is(f"{_BUFFER}.enable", False),
        f"{_BUFFER}.enable=True reads it",
    ),
    Idle(
        _each(_MODEL, "lora_alpha lora_dropout target_modules exclude_modules"),
        _is(f"{_MODEL}.uses_lora", False),
        f"{_MODEL}.lora_rank=0 trains no adapter",
    ),
    Idle(
        (f"{_MODEL}.fused_kernel_options.impl_backend",),
        _is(f"{_MODEL}.use_fused_kernels", False),
        f"{_MODEL}.use_fused_kernels=True reads it",
        unless=("triton",),  # which has a check of its own
    ),
    Idle(
        (f"{_ACTOR}.entropy_checkpointing",),
        _is(f"{_MODEL}.use_fused_kernels", True),
        f"{_MODEL}.use_fused_kernels=True keeps nothing for the entropy",
    ),
    Idle(
        (f"{_ACTOR}.entropy_checkpointing",),
        _is(f"{_ACTOR}.needs_entropy", False),
        f"the update computes no entropy without {_ACTOR}.entropy_coeff or calculate_entropy",
    ),
    Idle(_each(_VAL, "top_p top_k min_p"), _is(f"{_VAL}.do_sample", False), f"{_VAL}.do_sample=False does not sample"),
    Idle(("data.custom_cls.name",), _is("data.custom_cls.path", None), "data.custom_cls.path names no file"),
    Idle(("data.sampler.class_name",), _is("data.sampler.class_path", None), "data.sampler.class_path names no file"),
    Idle(
        ("reward_model.reward_manager_module.name",),
        _is("reward_model.reward_manager_module.path", None),
        "reward_model.reward_manager_module.path names no file",
    ),
    Idle(
        _each("reward_model", "max_concurrent max_rpm max_tpm estimated_tokens_per_request timeout"),
        _is_not("reward_model.reward_manager", "rate_limited"),
        "reward_model.reward_manager=rate_limited reads it",
    ),
)
