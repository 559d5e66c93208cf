"""From a config section to a backend: which network, which strategy, which weights. The one place roles are built."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch

from dovetail.backends.base import TrainBackend
from dovetail.backends.build import build_backend, precision_of
from dovetail.config.actor import Strategy
from dovetail.config.adapter import adapter_folder
from dovetail.config.critic import CriticConfig
from dovetail.config.fsdp import FSDPConfig
from dovetail.config.megatron import MegatronConfig
from dovetail.config.model import ModelConfig, RewardNetworkConfig
from dovetail.config.optim import OptimConfig
from dovetail.config.root import ActorRolloutRefConfig
from dovetail.models.activations import enable_gradient_checkpointing
from dovetail.models.compile import compile_layers
from dovetail.models.exact import use_exact_modules
from dovetail.models.fp8 import Recipe, use_fp8_projections
from dovetail.models.head import use_float32_head
from dovetail.models.load import Role, build_meta_model, load_config, model_folder
from dovetail.models.lora import add_adapters
from dovetail.models.policy import PolicyModel
from dovetail.models.router_replay import RouterReplay
from dovetail.models.value import RewardModel, ValueModel


def strategy_for(strategy: Strategy, world_size: int, fsdp: FSDPConfig) -> Strategy:
    """A sharding over one process is no sharding: the plain backend does the same without the machinery."""
    if strategy == "single" and world_size > 1:
        raise ValueError(
            f"strategy=single trains in one process, but this group has {world_size}, which would drift apart; use "
            "strategy=fsdp2, or set trainer.n_gpus_per_node=1 and trainer.nnodes=1."
        )
    if strategy in ("fsdp", "fsdp2") and world_size == 1 and not fsdp.offload_policy:
        return "single"
    return strategy


def build_policy(
    model: ModelConfig,
    *,
    strategy: Strategy,
    fsdp: FSDPConfig,
    megatron: MegatronConfig | None = None,
    optim: OptimConfig | None,
    grad_clip: float = 1.0,
    sp_size: int = 1,
    world_size: int = 1,
    use_torch_compile: bool = False,
    fp8_recipe: Recipe | None = None,
    freeze_vision_tower: bool = False,
    chunk_entropy: bool = False,
    recompute_entropy: bool = False,
    share_prefixes: bool = False,
    exact: bool = False,
    fp32_head: bool = False,
    replays_routing: bool = False,
    longest_row: int | None = None,
    device: torch.device,
) -> TrainBackend:
    """The actor (`optim` given) or the reference. LoRA adapters go into the actor only. `exact`: `models.exact`;
    `fp32_head`: `models.head.Float32Head`; `longest_row`: `models.longrope`."""
    # On a CPU compiling costs minutes and wins nothing that a test or a laptop run would notice.
    compiles = use_torch_compile and device.type == "cuda" and not exact
    if strategy == "megatron":
        return _on_megatron(
            model, "policy", megatron, optim=optim, grad_clip=grad_clip, recompute=model.enable_gradient_checkpointing,
            chunked_head=model.use_fused_kernels, compile_layers=compiles, device=device,
        )  # fmt: skip
    hf_model = build_meta_model(
        model.path,
        "policy",
        dtype=precision_of(fsdp, trains=optim is not None).master,
        override_config=model.override_config,
        trust_remote_code=model.trust_remote_code,
        external_lib=model.external_lib,
        longest_row=longest_row,
    )
    if optim is not None and model.uses_lora:
        add_adapters(hf_model, model)
    if optim is not None and freeze_vision_tower:
        _freeze_vision_towers(hf_model)
    if exact:
        use_exact_modules(hf_model)
    elif fp32_head:
        use_float32_head(hf_model)
    if fp8_recipe is not None:
        use_fp8_projections(hf_model, fp8_recipe, device)
    router_replay = RouterReplay(hf_model) if replays_routing else None
    if optim is not None and model.enable_gradient_checkpointing:
        enable_gradient_checkpointing(hf_model)
    if compiles:
        compile_layers(hf_model)
    network = PolicyModel(
        hf_model,
        use_remove_padding=model.use_remove_padding,
        share_prefixes=share_prefixes,
        router_replay=router_replay,
        use_fused_kernels=model.use_fused_kernels,
        use_triton=_use_triton(model.fused_kernel_options.impl_backend, device),
        chunk_entropy=chunk_entropy,
        recompute_entropy=recompute_entropy,
        # It would be copied to the host and back, which takes longer than a product.
        keep_head_gradient=False if model.enable_activation_offload else None,
    )
    return build_backend(
        strategy_for(strategy, world_size, fsdp),
        network,
        weights=model_folder(model.path),
        adapter=None if optim is None else adapter_folder(model),
        fsdp=fsdp,
        optim=optim,
        max_grad_norm=grad_clip,
        sp_size=sp_size,
        offload_activations=optim is not None and model.enable_activation_offload,
        device=device,
    )


def build_actor(
    policy: ActorRolloutRefConfig,
    total_training_steps: int,
    *,
    world_size: int,
    replays_routing: bool = False,
    device: torch.device,
) -> TrainBackend:
    """The policy that is trained. `total_training_steps` is the length of its schedule where the config has none."""
    actor, optim = policy.actor, _scheduled(policy.actor.optim, total_training_steps)
    return build_policy(
        policy.model,
        strategy=actor.strategy,
        fsdp=actor.fsdp_config,
        megatron=actor.megatron,
        optim=optim,
        grad_clip=actor.grad_clip,
        sp_size=actor.ulysses_sequence_parallel_size,
        world_size=world_size,
        use_torch_compile=actor.use_torch_compile,
        fp8_recipe=actor.fp8_recipe,
        freeze_vision_tower=actor.freeze_vision_tower,
        chunk_entropy=actor.entropy_from_logits_with_chunking,
        recompute_entropy=actor.entropy_checkpointing,
        share_prefixes=actor.use_prefix_grouper,
        exact=policy.rollout.exact,
        fp32_head=policy.rollout.fp32_lm_head,
        replays_routing=replays_routing,
        longest_row=policy.rollout.context_length,
        device=device,
    )


def build_critic(
    critic: CriticConfig,
    total_training_steps: int,
    *,
    world_size: int,
    role: Literal["value", "reward"] = "value",
    device: torch.device,
) -> TrainBackend:
    """The network of the section `critic`: a value network, or a reward model in training."""
    return build_value(
        critic.model,
        strategy=critic.strategy,
        fsdp=critic.fsdp_config,
        megatron=critic.megatron,
        optim=_scheduled(critic.optim, total_training_steps),
        grad_clip=critic.grad_clip,
        sp_size=critic.ulysses_sequence_parallel_size,
        world_size=world_size,
        role=role,
        device=device,
    )


def _scheduled(optim: OptimConfig, total_training_steps: int) -> OptimConfig:
    """`optim` with the length of its schedule, where the config gives none."""
    if optim.total_training_steps > 0:
        return optim
    return optim.model_copy(update={"total_training_steps": total_training_steps})


def build_value(
    model: ModelConfig | RewardNetworkConfig,
    *,
    strategy: Strategy,
    fsdp: FSDPConfig,
    megatron: MegatronConfig | None = None,
    optim: OptimConfig | None,
    grad_clip: float = 1.0,
    sp_size: int = 1,
    world_size: int = 1,
    role: Literal["value", "reward"] = "value",
    device: torch.device,
) -> TrainBackend:
    """The folder's network with a scalar head, fresh where it has none. Without `optim` it only infers."""
    assert model.path is not None, "asked for before"
    trained = model if optim is not None and isinstance(model, ModelConfig) else None
    recompute = trained is not None and trained.enable_gradient_checkpointing
    if strategy == "megatron":
        return _on_megatron(
            model, role, megatron, optim=optim, grad_clip=grad_clip, recompute=recompute, device=device
        )  # fmt: skip
    hf_model = build_meta_model(
        model.path,
        role,
        dtype=precision_of(fsdp, trains=optim is not None).master,
        override_config=model.override_config,
        trust_remote_code=model.trust_remote_code,
        external_lib=model.external_lib,
    )
    if trained is not None and trained.uses_lora:
        add_adapters(hf_model, trained)
    if recompute:
        enable_gradient_checkpointing(hf_model)
    return build_backend(
        strategy_for(strategy, world_size, fsdp),
        (ValueModel if role == "value" else RewardModel)(hf_model, use_remove_padding=model.use_remove_padding),
        weights=model_folder(model.path),
        adapter=None if trained is None else adapter_folder(trained),
        fsdp=fsdp,
        optim=optim,
        max_grad_norm=grad_clip,
        sp_size=sp_size,
        offload_activations=trained is not None and trained.enable_activation_offload,
        device=device,
    )


def build_reward(model: RewardNetworkConfig, **options: Any) -> TrainBackend:
    """The reward model: inference only. `options` are those of `build_value`."""
    return build_value(model, fsdp=model.fsdp_config, optim=None, role="reward", **options)


def _on_megatron(
    model: ModelConfig | RewardNetworkConfig,
    role: Role,
    megatron: MegatronConfig | None,
    *,
    optim: OptimConfig | None = None,
    grad_clip: float = 1.0,
    recompute: bool = False,
    chunked_head: bool = False,
    compile_layers: bool = False,
    device: torch.device,
) -> TrainBackend:
    from dovetail.backends.megatron.build import build_megatron_backend

    assert model.path is not None, "asked for before"
    hf_config = load_config(
        model.path,
        model.override_config,
        trust_remote_code=model.trust_remote_code,
        external_lib=model.external_lib,
    )
    if role != "policy":
        hf_config.num_labels = 1
    return build_megatron_backend(
        hf_config,
        role,
        weights=model_folder(model.path),
        megatron=megatron or MegatronConfig(),
        optim=optim,
        max_grad_norm=grad_clip,
        recompute=recompute,
        chunked_head=chunked_head,
        compile_layers=compile_layers,
        device=device,
    )


def _freeze_vision_towers(hf_model: Any) -> None:
    """No gradients for the submodels of `vision_config`. Called after LoRA, so that adapters in there freeze too."""
    vision = getattr(hf_model.config, "vision_config", None)
    for module in hf_model.modules():
        if vision is not None and type(getattr(module, "config", None)) is type(vision):
            module.requires_grad_(False)


def _use_triton(impl_backend: str, device: torch.device) -> bool | None:
    """The fused head's `use_triton`; None lets it decide."""
    if impl_backend == "triton" and (device.type != "cuda" or importlib.util.find_spec("triton") is None):
        missing = "CUDA" if device.type != "cuda" else "the package triton"
        raise ValueError(
            f"actor_rollout_ref.model.fused_kernel_options.impl_backend=triton needs {missing}, and this process runs "
            f"on {device} without it; use auto or torch."
        )
    return None if impl_backend == "auto" else impl_backend == "triton"
