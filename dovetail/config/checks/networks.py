"""Options of the networks that need or exclude each other: LoRA, fused head, packing, offload, reward model."""

from __future__ import annotations

from dovetail.config.checks.examined import Check, Examined, Findings

# Below this peak learning rate adapters barely move: they start at zero and are a small share of the weights.
LOW_ADAPTER_LR = 3e-6


def _policy(run: Examined) -> Findings:
    model, actor, critic = run.model, run.actor, run.config.critic
    if not model.path:
        yield run.error("@model.path is not set; give a folder, or a name on the Hugging Face hub (model=org/name).")
    why = "that backend trains no adapters"
    if model.uses_lora and actor.strategy == "megatron":
        yield run.error(f"<model.lora_rank> with <actor.strategy>: {why}; use @actor.strategy=fsdp2.")
    elif model.uses_lora and actor.optim.lr < LOW_ADAPTER_LR:
        lr = actor.optim.lr
        yield run.warning(f"@actor.optim.lr={lr:g} is for full weights, <model.lora_rank> trains adapters; try 3e-5.")
    if run.config.uses_critic and critic.model.uses_lora and critic.strategy == "megatron":
        yield run.error(f"<critic.model.lora_rank> with <critic.strategy>: {why}; use @critic.strategy=fsdp2.")
    if actor.use_dynamic_bsz and not model.use_remove_padding:
        yield run.warning(
            "<model.use_remove_padding> computes padding, which <actor.use_dynamic_bsz> does not count, so memory may "
            "not suffice; set @model.use_remove_padding=True, if the model can be packed."
        )
    if actor.freeze_vision_tower and run.shape is not None and not run.shape.vision:
        yield run.warning(f"<actor.freeze_vision_tower>, but {run.shape.model_type} has no vision tower; take it out.")
    kernel = "model.fused_kernel_options.impl_backend"
    if model.use_fused_kernels and run.value(kernel) == "triton" and run.trainer.device == "cpu":
        yield run.error(f"<{kernel}> needs CUDA and trainer.device=cpu; use @{kernel}=auto.")


def _activation_offload(run: Examined) -> Findings:
    models = {"model": run.model}
    models |= {"critic.model": run.config.critic.model} if run.config.uses_critic else {}
    for name, model in models.items():
        if model.enable_activation_offload and not model.enable_gradient_checkpointing:
            key = f"{name}.enable_activation_offload"
            yield run.error(f"<{key}> moves checkpointed activations; set enable_gradient_checkpointing=True.")


def _reward_network(run: Examined) -> Findings:
    reward = run.config.reward_model
    if reward.enable and not reward.model.path:
        yield run.error("@reward_model.model.path is not set: <reward_model.enable> needs a network; give its folder.")


NETWORKS: tuple[Check, ...] = (_policy, _activation_offload, _reward_network)
