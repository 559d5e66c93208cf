"""One table from older and other spellings to the one typed key, with a notice for each use.

A spelling that needs arithmetic or several keys at once is in `dovetail.config.translate.groups`.
Two spellings of one key that disagree are a problem that names both. Null in an old spelling means "not set".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dovetail.config.keys import catalogue
from dovetail.config.root import DovetailConfig
from dovetail.config.translate import asynchronous, backends, distillation, engines
from dovetail.config.translate.groups import GROUP_RULES, GROUP_SPELLINGS, Translated


@dataclass(frozen=True)
class Translation:
    """`old` is read as `new`. Both may end with `.*` and then move a whole section."""

    old: str
    new: str
    why: str = ""

    def apply(self, key: str) -> str | None:
        """The new key when this rule is for `key`."""
        if not self.old.endswith(".*"):
            return self.new if key == self.old else None
        prefix = self.old[:-1]
        return self.new[:-1] + key.removeprefix(prefix) if key.startswith(prefix) else None


_ARR = "actor_rollout_ref"
_ACTOR, _REF, _ROLLOUT, _MODEL = f"{_ARR}.actor", f"{_ARR}.ref", f"{_ARR}.rollout", f"{_ARR}.model"
_CORRECTION = "algorithm.rollout_correction"
_CONVERSATION = "messages_key tools_key enable_thinking_key enable_thinking_default"
_WHOLE_RUN, _NETWORK = "it holds for the whole run", "it is a choice of the network"


def _moved(old: str, new: str, names: str, why: str = "") -> Iterator[Translation]:
    """Keys that have the same names in another section."""
    return (Translation(f"{old}.{name}", f"{new}.{name}", why) for name in names.split())


def _moved_from_fsdp() -> Iterator[Translation]:
    """Keys of the role that were also written inside its sharding section."""
    for role, sharding in (
        (_ACTOR, f"{_ACTOR}.fsdp_config"),
        (_REF, f"{_REF}.fsdp_config"),
        ("critic", "critic.fsdp_config"),
        ("reward_model", "reward_model.model.fsdp_config"),
    ):
        why = "the role has one such key, whatever the backend"
        yield from _moved(sharding, role, "strategy ulysses_sequence_parallel_size", why)
        yield Translation(f"{sharding}.dtype", f"{sharding}.mixed_precision.param_dtype", "it is the compute dtype")
        yield Translation(f"{sharding}.min_num_params", f"{sharding}.wrap_policy.min_num_params")
        yield from _moved(sharding, "trainer", "full_determinism", _WHOLE_RUN)
    names = "use_torch_compile entropy_from_logits_with_chunking entropy_checkpointing"
    yield from _moved(f"{_ACTOR}.fsdp_config", _ACTOR, names, "it is a choice of the head")
    yield from _moved(f"{_REF}.fsdp_config", _REF, "use_torch_compile", "it is a choice of the head")
    for role in (_ACTOR, _REF, "critic"):
        yield Translation(f"{role}.megatron_config.*", f"{role}.megatron.*")
        yield from _moved(f"{role}.megatron", "trainer", "full_determinism", _WHOLE_RUN)
    yield from _moved(f"{_ACTOR}.megatron", _ACTOR, "strategy use_torch_compile", "the role has one such key")


def _of_roles() -> Iterator[Translation]:
    for role in (_ACTOR, "critic"):
        yield Translation(f"{role}.optim.clip_grad", f"{role}.grad_clip", "one clip for every backend")
    for model in (_MODEL, "critic.model"):
        why = "adapters have the same keys for every backend"
        for name in ("rank", "alpha", "dropout", "merge", "adapter_path"):
            yield Translation(f"{model}.lora.{name}", f"{model}.lora_{name}", why)
        yield from _moved(f"{model}.lora", model, "target_modules exclude_modules", why)


TRANSLATIONS: tuple[Translation, ...] = (
    *(Translation(old, key.name) for key in catalogue(DovetailConfig).values() for old in key.other_names),
    Translation("critic.model.fsdp_config.*", "critic.fsdp_config.*", "sharding belongs to the role"),
    *(Translation(f"{role}.fsdp.*", f"{role}.fsdp_config.*") for role in ("critic", _ACTOR, _REF)),
    Translation("actor_rollout_ref.critic.*", "critic.*"),
    Translation("reward_model.fsdp_config.*", "reward_model.model.fsdp_config.*"),
    Translation("reward_model.param_offload", "reward_model.megatron.param_offload"),
    Translation(f"{_REF}.param_offload", f"{_REF}.megatron.param_offload"),
    Translation("reward.custom_reward_function.*", "custom_reward_function.*"),
    Translation("reward.reward_model.model_path", "reward_model.model.path"),
    Translation("reward.reward_model.*", "reward_model.*"),
    Translation("reward.*", "reward_model.*", "one section for scores"),
    Translation("reward_manager.*", "reward_model.reward_manager.*"),
    Translation("reward_model.reward_manager.name", "reward_model.reward_manager"),
    Translation("reward_model.reward_manager.module.*", "reward_model.reward_manager_module.*"),
    Translation("reward_model.reward_loop_module_path", "reward_model.reward_manager_module.path"),
    Translation("reward_model.reward_loop_class_name", "reward_model.reward_manager_module.name"),
    Translation("reward_model.reward_kwargs.overlong_buffer_cfg.*", "reward_model.overlong_buffer.*"),
    Translation("reward_model.overlong_buffer_cfg.*", "reward_model.overlong_buffer.*"),
    Translation("reward_model.reward_kwargs.max_resp_len", "reward_model.max_resp_len"),
    Translation("reward_model.custom_reward_function.*", "custom_reward_function.*"),
    Translation("ray_kwargs.ray_init.*", "ray_init.*"),
    Translation("trainer.profile_steps", "global_profiler.steps"),
    Translation("ray_kwargs.timeline_json_file", "ray_init.timeline_json_file"),
    Translation("critic.kl_ctrl.*", "algorithm.kl_ctrl.*"),
    Translation(f"{_ACTOR}.policy_loss.rollout_correction.*", f"{_CORRECTION}.*"),
    *_moved(_ACTOR, _MODEL, "use_fused_kernels use_remove_padding", _NETWORK),
    *_moved(
        _ACTOR, f"{_ACTOR}.policy_loss", "loss_mode clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef"
    ),
    Translation(f"{_ACTOR}.dtype", f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype", "it is the compute dtype"),
    Translation(f"{_REF}.dtype", f"{_REF}.fsdp_config.mixed_precision.param_dtype", "it is the compute dtype"),
    *_moved(f"{_ACTOR}.policy_loss", _ACTOR, "tau_pos tau_neg"),
    Translation(f"{_ACTOR}.megatron.router_replay.*", f"{_ACTOR}.router_replay.*"),
    Translation(f"{_ACTOR}.ppo_infer_micro_batch_size_per_gpu", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    Translation(f"{_ACTOR}.ppo_infer_max_token_len_per_gpu", f"{_ROLLOUT}.log_prob_max_token_len_per_gpu"),
    *_moved(_ROLLOUT, _MODEL, "trust_remote_code"),
    *_moved(f"{_ROLLOUT}.checkpoint_engine", _ROLLOUT, "update_weights_bucket_megabytes"),
    *_moved(_ROLLOUT, "trainer", "seed full_determinism", _WHOLE_RUN),
    Translation(f"{_ROLLOUT}.multi_turn", f"{_ROLLOUT}.multi_turn.enable"),
    Translation(f"{_ROLLOUT}.tool_kwargs.tools_config_file", f"{_ROLLOUT}.multi_turn.tool_config_path"),
    *_moved("rollout", "trainer", "total_epochs test_freq"),
    Translation("rollout.*", f"{_ROLLOUT}.*", "generation has one section"),
    Translation("sandbox_fusion.*", "reward_model.sandbox_fusion.*"),
    Translation("trainer.worker_env.*", "ray_init.runtime_env.env_vars.*"),
    *_moved_from_fsdp(),
    *_of_roles(),
    # verl's SFT trainers have model, optimizer and micro-batch at the root; here they are the actor's.
    Translation("model.partial_pretrain", f"{_MODEL}.path"),
    Translation("model.strategy", f"{_ACTOR}.strategy"),
    Translation("model.fsdp_config.offload_params", f"{_ACTOR}.fsdp_config.param_offload"),
    Translation("model.fsdp_config.*", f"{_ACTOR}.fsdp_config.*"),
    Translation("model.*", f"{_MODEL}.*"),
    Translation("optim.warmup_steps_ratio", f"{_ACTOR}.optim.lr_warmup_steps_ratio"),
    Translation("optim.*", f"{_ACTOR}.optim.*"),
    Translation("ulysses_sequence_parallel_size", f"{_ACTOR}.ulysses_sequence_parallel_size"),
    Translation("use_remove_padding", f"{_MODEL}.use_remove_padding"),
    Translation("data.micro_batch_size_per_gpu", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
    Translation("data.use_dynamic_bsz", f"{_ACTOR}.use_dynamic_bsz"),
    Translation("data.max_token_len_per_gpu", f"{_ACTOR}.ppo_max_token_len_per_gpu"),
    *_moved("data", "sft", f"response_key prompt_dict_keys response_dict_keys {_CONVERSATION}"),
    *_moved("data.multiturn", "sft", _CONVERSATION),
    Translation("data.num_workers", "data.dataloader_num_workers"),
    Translation("data.balance_dp_token", "trainer.balance_batch"),
    Translation("data.chat_template", f"{_MODEL}.custom_chat_template"),
    *(Translation(f"{old}.*", f"{_ACTOR}.checkpoint.*") for old in ("checkpoint", "trainer.checkpoint")),
)

OTHER_SPELLINGS = (
    *((rule.old, rule.new, rule.why) for rule in TRANSLATIONS),
    *GROUP_SPELLINGS,
    *backends.SPELLINGS,
    *asynchronous.SPELLINGS,
    *engines.SPELLINGS,
    *distillation.SPELLINGS,
)
"""For the documents: written as, read as, why."""

VALUE_SPELLINGS = {key.name: key.other_values for key in catalogue(DovetailConfig).values() if key.other_values}
"""Other spellings of values, by the key they are for."""


def translate(leaves: Mapping[str, Any]) -> Translated:
    """Bring every leaf key to its one spelling."""
    done = Translated(_without_unused_adapters(leaves))
    if done.leaves.get("rollout.n") is not None and done.leaves.get(f"{_ROLLOUT}.n") is not None:
        value = done.leaves.pop("rollout.n")
        done.notice("rollout.n", f"rollout.n={value} has no effect beside {_ROLLOUT}.n.")
    backend = engines.training_engine(done)
    for key in list(done.leaves):
        new, why = canonical(f"{backend}{key.removeprefix('engine')}" if key.startswith("engine.") else key)
        if new != key and (value := done.leaves.pop(key)) is not None:
            done.notice(key, f"{key} is read as {new}" + (f": {why}." if why else "."))
            done.put(new, value, key)
    for rule in (*asynchronous.RULES, *engines.RULES, *backends.RULES, *distillation.RULES, *GROUP_RULES):
        rule(done)
    for key, spellings in VALUE_SPELLINGS.items():
        value = done.leaves.get(key)
        if isinstance(value, str | int) and value in spellings:
            done.leaves[key] = spellings[value]
            done.notice(key, f"{key}={value} is read as {spellings[value]}.")
    return done


def _without_unused_adapters(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Full files carry a `lora` section of rank 0 beside `lora_rank`; its other values are nobody's wish."""
    unused = tuple(f"{model}.lora." for model in (_MODEL, "critic.model") if leaves.get(f"{model}.lora.rank") == 0)
    return {key: value for key, value in leaves.items() if not key.startswith(unused)} if unused else dict(leaves)


@cache
def canonical(key: str) -> tuple[str, str]:
    """The one spelling of `key`, and why; the key itself when it has no other."""
    reasons: list[str] = []
    for _ in range(4):  # reward.* -> reward_model.reward_kwargs.* -> reward_model.overlong_buffer.*
        rule = next((rule for rule in TRANSLATIONS if rule.apply(key) is not None), None)
        if rule is None:
            break
        key = rule.apply(key) or key
        if rule.why and rule.why not in reasons:
            reasons.append(rule.why)
    return key, "; ".join(reasons)
