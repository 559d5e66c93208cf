"""Options of the networks that need or exclude each other: LoRA, fused head, packing, offload, reward model."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.config.checks.checked import ACTOR, MODEL, Checked, error, warning
from dovetail.config.errors import Problem

# Below this peak learning rate adapters barely move: they start at zero and are a small share of the weights.
LOW_ADAPTER_LR = 3e-6


def policy_has_weights(run: Checked) -> Iterator[Problem]:
    key = f"{MODEL}.path"
    if not run.config.actor_rollout_ref.model.path:
        yield error(key, f"{key} is not set; give the Hugging Face folder of the policy.")


def adapters_are_trainable(run: Checked) -> Iterator[Problem]:
    policy = run.config.actor_rollout_ref
    if not policy.model.uses_lora:
        return
    if policy.actor.strategy == "megatron":
        yield error(
            f"{MODEL}.lora_rank",
            f"{MODEL}.lora_rank={policy.model.lora_rank} trains adapters, which {ACTOR}.strategy=megatron does not "
            f"support; use {ACTOR}.strategy=fsdp2, or {MODEL}.lora_rank=0.",
        )
    elif policy.actor.optim.lr < LOW_ADAPTER_LR:
        yield warning(
            f"{ACTOR}.optim.lr",
            f"{ACTOR}.optim.lr={policy.actor.optim.lr:g} is a rate for full weights and {MODEL}.lora_rank="
            f"{policy.model.lora_rank} trains adapters; try 3e-5.",
        )


def head_runs_on_the_device(run: Checked) -> Iterator[Problem]:
    policy = run.config.actor_rollout_ref
    model = policy.model
    if model.use_fused_kernels and model.fused_kernel_options.impl_backend == "triton":
        if run.config.trainer.device == "cpu":
            key = f"{MODEL}.fused_kernel_options.impl_backend"
            yield error(key, f"{key}=triton needs CUDA and trainer.device=cpu; use {key}=auto.")
    elif not model.use_fused_kernels and model.fused_kernel_options.impl_backend == "triton":
        yield warning(
            f"{MODEL}.fused_kernel_options.impl_backend",
            f"{MODEL}.fused_kernel_options.impl_backend=triton has no effect with {MODEL}.use_fused_kernels=False; "
            f"set {MODEL}.use_fused_kernels=True.",
        )
    if model.use_fused_kernels and policy.actor.entropy_from_logits_with_chunking:
        yield warning(
            f"{ACTOR}.entropy_from_logits_with_chunking",
            f"{ACTOR}.entropy_from_logits_with_chunking=True has no effect with {MODEL}.use_fused_kernels=True, which "
            "never holds logits; take it out.",
        )


def activations_are_checkpointed_before_they_are_offloaded(run: Checked) -> Iterator[Problem]:
    models = {MODEL: run.config.actor_rollout_ref.model}
    if run.config.uses_critic:
        models["critic.model"] = run.config.critic.model
    for prefix, model in models.items():
        if model.enable_activation_offload and not model.enable_gradient_checkpointing:
            yield error(
                f"{prefix}.enable_activation_offload",
                f"{prefix}.enable_activation_offload=True moves checkpointed activations and "
                f"{prefix}.enable_gradient_checkpointing=False keeps none; set enable_gradient_checkpointing=True.",
            )


def token_budgets_count_real_tokens(run: Checked) -> Iterator[Problem]:
    policy = run.config.actor_rollout_ref
    if policy.actor.use_dynamic_bsz and not policy.model.use_remove_padding:
        yield warning(
            f"{MODEL}.use_remove_padding",
            f"{ACTOR}.use_dynamic_bsz=True counts real tokens and {MODEL}.use_remove_padding=False computes "
            "padding too, "
            f"so a micro-batch may need far more memory than its budget; set {MODEL}.use_remove_padding=True.",
        )


def reward_network_is_complete(run: Checked) -> Iterator[Problem]:
    reward = run.config.reward_model
    if not reward.enable:
        if reward.model.path:
            yield warning(
                "reward_model.enable",
                f"reward_model.model.path={reward.model.path} is set and reward_model.enable=False, so it is not used; "
                "set reward_model.enable=True.",
            )
        return
    if not reward.model.path:
        yield error(
            "reward_model.model.path",
            "reward_model.enable=True needs a network and reward_model.model.path is not set; "
            "give its folder, or set reward_model.enable=False to score by rules.",
        )
    if reward.enable_resource_pool and reward.nnodes == 0:
        yield error(
            "reward_model.nnodes",
            "reward_model.enable_resource_pool=True gives the reward network its own devices and "
            "reward_model.nnodes=0; "
            "use reward_model.nnodes=1, or enable_resource_pool=False.",
        )


def frozen_tower_exists(run: Checked) -> Iterator[Problem]:
    if run.config.actor_rollout_ref.actor.freeze_vision_tower and run.shape is not None and not run.shape.vision:
        key = f"{ACTOR}.freeze_vision_tower"
        yield warning(key, f"{key}=True, but {run.shape.model_type} has no vision tower; take it out.")
