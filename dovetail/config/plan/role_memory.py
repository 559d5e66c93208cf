"""What one role keeps on a device while it computes and while it waits. Formulas: docs/plan.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.config.fsdp import FSDPConfig, full_dtype
from dovetail.config.megatron import MegatronConfig
from dovetail.config.model import ModelConfig
from dovetail.config.optim import OptimConfig
from dovetail.config.plan.activations import forward_activations, fused_head_bytes, logits_bytes, training_activations
from dovetail.config.plan.batches import PassBatches
from dovetail.config.plan.layout import Device, RoleLayout, TrainingSection
from dovetail.config.plan.model_shape import ModelShape, Shapes
from dovetail.config.plan.states import ModelStates, Precision, lora_share, model_states
from dovetail.config.root import DovetailConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class RoleMemory:
    """The states of one role per pipeline stage, and what of them leaves the device between its phases."""

    layout: RoleLayout
    shape: ModelShape
    stages: tuple[ModelStates, ...]
    # What waits in host memory while another role computes, of "weights", "gradients" and "optimizer".
    on_host: frozenset[str]
    # FSDP2's own offload: the device only ever holds what is gathered.
    always_on_host: bool
    # Bytes per weight of the gradient that is being summed; one unsharded unit of it exists at a time.
    reduce_bytes: float
    checkpointing: bool = False
    activation_offload: bool = False
    fused_head: bool = False
    # The fused head keeps the gradient of its logits where that fits: `dovetail.models.fused_head.gradient_fits`.
    may_keep_gradient: bool = False
    needs_entropy: bool = False
    compiled: bool = False

    def at(self, stage: int) -> ModelStates:
        """States of a stage; roles with fewer stages repeat their last."""
        return self.stages[min(stage, len(self.stages) - 1)]

    def waiting(self, states: ModelStates) -> dict[str, float]:
        """Bytes by item on the device while the role waits."""
        # FSDP frees gradients after the step; Megatron keeps its buffers.
        gradients = states.gradients if self.layout.is_megatron else 0.0
        items = {"weights": states.weights, "gradients": gradients, "optimizer": states.optimizer}
        return {item: 0.0 if item in self.on_host else size for item, size in items.items()}

    def all_waiting(self, stage: int | None) -> float:
        """Bytes on the device while another role computes; without a stage, those of the fullest."""
        stages = self.stages if stage is None else [self.at(stage)]
        return max(sum(self.waiting(states).values()) for states in stages)

    def host_bytes(self) -> float:
        """Most bytes that one device moves to host memory."""
        return max(sum(getattr(states, item) for item in self.on_host) for states in self.stages)

    def computing(
        self, stage: int, batch: PassBatches, device: Device, *, keeps_gradient: bool = False
    ) -> dict[str, float]:
        """Bytes by item on a device of `stage` while the role makes this pass."""
        states, shape, layout, tokens = self.at(stage), self.shape, self.layout, batch.tokens_per_device
        on_device = not self.always_on_host
        logits = 0.0
        if states.holds_head:
            logits = self._head(tokens, device, training=batch.trains, keeps=keeps_gradient)
        if batch.trains:
            activations = training_activations(
                shape,
                layout,
                stage,
                tokens,
                micro_batches=batch.micro_batches,
                checkpointing=self.checkpointing,
                offload=self.activation_offload,
                compiled=self.compiled,
                logits=logits,
            )
            gradients = on_device * states.gradients
            # The gradient of one unit before it is cut over the ranks.
            gradients += states.largest_unit * self.reduce_bytes if layout.shard_size > 1 else 0.0
            optimizer = on_device * states.optimizer
        else:
            # The head comes after the layers: of the two, only the larger is alive at the peak.
            activations = max(0.0, forward_activations(shape, layout, tokens) - logits)
            gradients, optimizer = self.waiting(states)["gradients"], self.waiting(states)["optimizer"]
        return {
            "weights": on_device * states.weights + states.gathered,
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": activations,
            "logits": logits,
        }

    def _head(self, tokens: float, device: Device, *, training: bool, keeps: bool) -> float:
        if self.fused_head:
            accelerator = device.is_accelerator
            return fused_head_bytes(
                self.shape, self.layout, tokens, training=training, accelerator=accelerator, keeps=keeps
            )
        return logits_bytes(self.shape, self.layout, tokens, training=training, entropy=self.needs_entropy)


def role_memories(
    config: DovetailConfig, layouts: dict[str, RoleLayout], shapes: Shapes, device: Device
) -> dict[str, RoleMemory]:
    """Every role with a network whose shape is known."""
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    actor, ref = policy.actor, policy.ref
    roles: dict[str, RoleMemory] = {}
    if "actor" in layouts and shapes.policy is not None:
        # Log-probs over sampling masks are computed in chunks, too.
        fused = policy.model.use_fused_kernels or policy.rollout.keep_sampling_mask
        layout = layouts["actor"]
        memory = _role_memory(actor, layout, shapes.policy, actor.optim, policy.model)
        compiled = actor.use_torch_compile and device.is_accelerator
        if layout.is_megatron:
            dense = not shapes.policy.is_moe and shapes.policy.latent_cache_width is None
            compiled = compiled and dense and actor.megatron.has_plain_layers
        roles["actor"] = replace(
            memory,
            fused_head=fused,
            may_keep_gradient=device.is_accelerator and _may_keep_gradient(config, memory),
            needs_entropy=actor.needs_entropy,
            compiled=compiled,
        )
        # With LoRA the reference is the actor with its adapters switched off: no second copy.
        reference = shapes.teacher if config.distills else None if policy.model.uses_lora else shapes.policy
        if "ref" in layouts and reference is not None:
            memory = _role_memory(ref, layouts["ref"], reference)
            roles["ref"] = replace(memory, fused_head=fused)
            for number, teacher in enumerate(shapes.other_teachers, 2):
                roles[f"ref {number}"] = _role_memory(ref, layouts["ref"], teacher)
    if "critic" in layouts and shapes.critic is not None:
        shape = _with_value_head(shapes.critic)
        roles["critic"] = _role_memory(critic, layouts["critic"], shape, critic.optim, critic.model)
    if "reward_model" in layouts and shapes.reward is not None:
        shape = _with_value_head(shapes.reward)
        roles["reward_model"] = _role_memory(reward, layouts["reward_model"], shape)
    return roles


def _may_keep_gradient(config: DovetailConfig, actor: RoleMemory) -> bool:
    policy = config.actor_rollout_ref
    has_kernels = config.trainer.device != "npu" and policy.model.fused_kernel_options.impl_backend != "torch"
    has_fused_head = policy.model.use_fused_kernels and not policy.rollout.keep_sampling_mask
    is_other_head = policy.rollout.exact or actor.layout.tensor_parallel > 1
    offloads = actor.activation_offload and not actor.layout.is_megatron
    is_off = policy.actor.needs_entropy or offloads or config.trainer.full_determinism
    return has_kernels and has_fused_head and not is_other_head and not is_off


def teacher_layer_bytes(config: DovetailConfig, shapes: Shapes) -> float:
    """The teacher's output layer, which every student's device keeps with `distill.kl=full`."""
    if not config.compares_vocabularies or shapes.teacher is None:
        return 0.0
    dtype = config.actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype
    return float(shapes.teacher.vocab_size * shapes.teacher.hidden_size * _bytes(dtype))


def _role_memory(
    section: TrainingSection,
    layout: RoleLayout,
    shape: ModelShape,
    optim: OptimConfig | None = None,
    model: ModelConfig | None = None,
) -> RoleMemory:
    """The memory of a role on a training backend; without an optimizer it is frozen."""
    fsdp, megatron = section.fsdp_config, section.megatron if layout.is_megatron else None
    precision = _megatron_precision(megatron, optim) if megatron else _fsdp_precision(fsdp, optim, layout)
    trainable, checkpointing = 0.0, False
    if optim is not None and model is not None:
        trainable = lora_share(shape, model.lora_rank) if model.uses_lora else 1.0
        checkpointing = model.enable_gradient_checkpointing
        if megatron:  # its own option goes before the model's
            default = "full" if checkpointing else ""
            checkpointing = megatron.override_transformer_config.get("recompute_granularity", default) == "full"
    always_on_host = not megatron and layout.backend == "fsdp2" and fsdp.offload_policy
    offloads = {
        "weights": section.offloading.param_offload,
        "gradients": megatron is not None and megatron.grad_offload,
        "optimizer": section.offloading.optimizer_offload,
    }
    return RoleMemory(
        layout,
        shape,
        stages=tuple(model_states(shape, layout, precision, trainable=trainable)),
        on_host=frozenset(item for item, offload in offloads.items() if offload or always_on_host),
        always_on_host=always_on_host,
        reduce_bytes=0.0 if megatron or not trainable else _bytes(fsdp.mixed_precision.reduce_dtype),
        checkpointing=checkpointing,
        activation_offload=model is not None and model.enable_activation_offload,
    )


def _with_value_head(shape: ModelShape) -> ModelShape:
    """The same backbone with one output per token."""
    return replace(shape, head=shape.hidden_size, tied=False, vocab_size=1)


def _fsdp_precision(fsdp: FSDPConfig, optim: OptimConfig | None, layout: RoleLayout) -> Precision:
    compute = _bytes(fsdp.mixed_precision.param_dtype)
    # What is never trained is kept in the dtype it computes in.
    master = compute if optim is None else _bytes(fsdp.model_dtype)
    keep = layout.backend == "fsdp2" and not fsdp.reshard_after_forward
    return Precision(master, compute, master, optimizer=_moments(optim) * master, keep_gathered=keep)


def _megatron_precision(megatron: MegatronConfig, optim: OptimConfig | None) -> Precision:
    weights = _bytes(megatron.dtype)
    # Moments and, under half-precision weights, a master copy: all fp32.
    optimizer = 4 * _moments(optim) + (4 if weights < 4 and optim is not None else 0)
    return Precision(weights, weights, 4, optimizer, distributed_optimizer=megatron.use_distributed_optimizer)


def _moments(optim: OptimConfig | None) -> int:
    if optim is None:
        return 0
    if optim.optimizer == "SGD":
        return 1 if optim.momentum else 0
    return 2


def _bytes(dtype: str) -> int:
    return BYTES[full_dtype(dtype)]
