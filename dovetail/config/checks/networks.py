"""Options of the networks that need or exclude each other: LoRA, fused head, packing, offload, reward model."""

from __future__ import annotations

from dovetail.config.checks.examined import Check, Examined, Findings

# Below this peak learning rate adapters barely move: they start at zero and are a small share of the weights.
LOW_ADAPTER_LR = 3e-6


def _policy(run: Examined) -> Findings:
    model, actor = run.config.actor_rollout_ref.model, run.config.actor_rollout_ref.actor
    if not model.path:
        yield run.error("@model.path is not set; give a folder, or a name on the Hugging Face hub (model=org/name).")
    if model.uses_lora and actor.strategy == "megatron":
        yield run.error(
            "<model.lora_rank> trains adapters, which <actor.strategy> does not support; use @actor.strategy=fsdp2, or "
            "@model.lora_rank=0."
        )
    elif model.uses_lora and actor.optim.lr < LOW_ADAPTER_LR:
        yield run.warning(
            f"@actor.optim.lr={actor.optim.lr:g} is a rate for full weights and <model.lora_rank> trains adapters; "
            "try 3e-5."
        )
    critic = run.config.critic
    if run.config.trainer.method == "reward" and critic.model.uses_lora and critic.strategy == "megatron":
        yield run.error(
            "<critic.model.lora_rank> trains adapters, which <critic.strategy> does not support; use "
            "@critic.strategy=fsdp2, or @critic.model.lora_rank=0."
        )
    if actor.use_dynamic_bsz and not model.use_remove_padding:
        yield run.warning(
            "<model.use_remove_padding> computes padding, which the token budgets of <actor.use_dynamic_bsz> do not "
            "count, so memory may not suffice; set @model.use_remove_padding=True."
        )
    if actor.freeze_vision_tower and run.shape is not None and not run.shape.vision:
        yield run.warning(f"<actor.freeze_vision_tower>, but {run.shape.model_type} has no vision tower; take it out.")
    kernel = "model.fused_kernel_options.impl_backend"
    if model.use_fused_kernels and run.value(kernel) == "triton" and run.config.trainer.device == "cpu":
        yield run.error(f"<{kernel}> needs CUDA and trainer.device=cpu; use @{kernel}=auto.")


def _activation_offload(run: Examined) -> Findings:
    models = {"model": run.config.actor_rollout_ref.model}
    models |= {"critic.model": run.config.critic.model} if run.config.uses_critic else {}
    for name, model in models.items():
        if model.enable_activation_offload and not model.enable_gradient_checkpointing:
            yield run.error(
                f"<{name}.enable_activation_offload> moves checkpointed activations and "
                f"<{name}.enable_gradient_checkpointing> keeps none; set enable_gradient_checkpointing=True."
            )


def _reward_network(run: Examined) -> Findings:
    reward = run.config.reward_model
    if reward.enable and not reward.model.path:
        yield run.error(
            "@reward_model.model.path is not set and <reward_model.enable> needs a network; give its folder, or set "
            "reward_model.enable=False to score by rules."
        )


NETWORKS: tuple[Check, ...] = (_policy, _activation_offload, _reward_network)
