"""Options of the networks that need or exclude each other: LoRA, fused head, packing, offload, reward model."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.config.checks.examined import Check, Examined
from dovetail.config.errors import Problem

# Below this peak learning rate adapters barely move: they start at zero and are a small share of the weights.
LOW_ADAPTER_LR = 3e-6


def _policy(run: Examined) -> Iterator[Problem]:
    model, actor = run.config.actor_rollout_ref.model, run.config.actor_rollout_ref.actor
    if not model.path:
        yield run.error("@model.path is not set; give a model on the Hugging Face hub (org/name) or the folder of one.")
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
    if actor.use_dynamic_bsz and not model.use_remove_padding:
        yield run.warning(
            "<actor.use_dynamic_bsz> counts real tokens and <model.use_remove_padding> computes padding too, so a "
            "micro-batch may need far more memory than its budget; set @model.use_remove_padding=True.",
            "model.use_remove_padding",
        )
    if actor.freeze_vision_tower and run.shape is not None and not run.shape.vision:
        yield run.warning(f"<actor.freeze_vision_tower>, but {run.shape.model_type} has no vision tower; take it out.")


def _fused_head(run: Examined) -> Iterator[Problem]:
    model = run.config.actor_rollout_ref.model
    if model.fused_kernel_options.impl_backend == "triton":
        key = "model.fused_kernel_options.impl_backend"
        if not model.use_fused_kernels:
            yield run.warning(
                f"<{key}> has no effect with <model.use_fused_kernels>; set @model.use_fused_kernels=True."
            )
        elif run.config.trainer.device == "cpu":
            yield run.error(f"<{key}> needs CUDA and trainer.device=cpu; use @{key}=auto.")
    if model.use_fused_kernels and run.config.actor_rollout_ref.actor.entropy_from_logits_with_chunking:
        yield run.warning(
            "<actor.entropy_from_logits_with_chunking> has no effect with <model.use_fused_kernels>, which never holds "
            "logits; take it out."
        )


def _activation_offload(run: Examined) -> Iterator[Problem]:
    models = {"model": run.config.actor_rollout_ref.model}
    models |= {"critic.model": run.config.critic.model} if run.config.uses_critic else {}
    for name, model in models.items():
        if model.enable_activation_offload and not model.enable_gradient_checkpointing:
            yield run.error(
                f"<{name}.enable_activation_offload> moves checkpointed activations and "
                f"<{name}.enable_gradient_checkpointing> keeps none; set enable_gradient_checkpointing=True."
            )


def _reward_network(run: Examined) -> Iterator[Problem]:
    reward = run.config.reward_model
    if not reward.enable and reward.model.path:
        yield run.warning(
            "<reward_model.model.path> is set and <reward_model.enable>, so it is not used; set "
            "reward_model.enable=True.",
            "reward_model.enable",
        )
    if reward.enable and not reward.model.path:
        yield run.error(
            "<reward_model.enable> needs a network and @reward_model.model.path is not set; give its folder, or set "
            "reward_model.enable=False to score by rules.",
            "reward_model.model.path",
        )
    if reward.enable and reward.enable_resource_pool and reward.nnodes == 0:
        yield run.error(
            "<reward_model.enable_resource_pool> gives the reward network its own devices and <reward_model.nnodes>; "
            "use reward_model.nnodes=1, or enable_resource_pool=False.",
            "reward_model.nnodes",
        )


NETWORKS: tuple[Check, ...] = (_policy, _fused_head, _activation_offload, _reward_network)
