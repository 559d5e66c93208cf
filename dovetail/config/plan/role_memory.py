"""What one role keeps on a device while it computes and while it waits. Formulas: docs/plan.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.config.actor import ActorConfig
from dovetail.config.critic import CriticConfig
from dovetail.config.fsdp import FSDPConfig, full_dtype
from dovetail.config.megatron import MegatronConfig
from dovetail.config.optim import OptimConfig
from dovetail.config.plan.layout import RoleLayout
from dovetail.config.plan.model_shape import ModelShape
from dovetail.config.plan.states import ModelStates, Precision, lora_share, model_states
from dovetail.config.ref import RefConfig
from dovetail.config.reward import RewardModelConfig

TrainingSection = ActorConfig | CriticConfig | RefConfig | RewardModelConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class RoleMemory:
    """The states of one role per pipeline stage, and what of them leaves the device between its phases."""

    layout: RoleLayout
    shape: ModelShape
    stages: tuple[ModelStates, ...]
    checkpointing: bool
    fused_head: bool
    activation_offload: bool
    needs_entropy: bool
    compiled: bool
    # Bytes per weight of the gradient that is being summed; one unsharded unit of it exists at a time.
    reduce_bytes: float
    weights_wait_on_host: bool
    optimizer_waits_on_host: bool
    gradients_wait_on_host: bool
    # FSDP2's own offload: the device only ever holds what is gathered.
    always_on_host: bool

    def waiting(self, stage: int) -> float:
        """Bytes on the device while another role computes."""
        if self.always_on_host:
            return 0.0
        states = self.at(stage)
        kept = 0.0 if self.weights_wait_on_host else states.weights
        kept += 0.0 if self.optimizer_waits_on_host else states.optimizer
        # FSDP frees gradients after the step; Megatron keeps its buffers.
        kept += states.gradients if self.layout.is_megatron and not self.gradients_wait_on_host else 0.0
        return kept

    def on_host(self) -> float:
        """Most bytes that one device moves to host memory."""
        return max(self._host_bytes(states) for states in self.stages)

    def at(self, stage: int) -> ModelStates:
        """States of a stage; roles with fewer stages repeat their last."""
        return self.stages[min(stage, len(self.stages) - 1)]

    def _host_bytes(self, states: ModelStates) -> float:
        if self.always_on_host:
            return states.weights + states.gradients + states.optimizer
        moved = states.weights if self.weights_wait_on_host else 0.0
        moved += states.optimizer if self.optimizer_waits_on_host else 0.0
        return moved + (states.gradients if self.gradients_wait_on_host else 0.0)


def role_memory(
    section: TrainingSection,
    layout: RoleLayout,
    shape: ModelShape,
    *,
    fsdp: FSDPConfig,
    optim: OptimConfig | None,
    checkpointing: bool,
    fused_head: bool,
    activation_offload: bool = False,
    needs_entropy: bool = False,
    compiled: bool = False,
    lora_rank: int = 0,
) -> RoleMemory:
    """The memory of a role on a training backend; without an optimizer it is frozen."""
    megatron = section.megatron if layout.is_megatron else None
    precision = _megatron_precision(megatron, optim) if megatron else _fsdp_precision(fsdp, optim, layout)
    trainable = 0.0 if optim is None else (lora_share(shape, lora_rank) if lora_rank else 1.0)
    return RoleMemory(
        layout=layout,
        shape=shape,
        stages=tuple(model_states(shape, layout, precision, trainable=trainable)),
        checkpointing=checkpointing,
        fused_head=fused_head,
        activation_offload=activation_offload,
        needs_entropy=needs_entropy,
        compiled=compiled and not layout.is_megatron,
        reduce_bytes=0.0 if megatron or not trainable else _bytes(fsdp.mixed_precision.reduce_dtype),
        weights_wait_on_host=megatron.param_offload if megatron else fsdp.param_offload,
        optimizer_waits_on_host=megatron.optimizer_offload if megatron else fsdp.optimizer_offload,
        gradients_wait_on_host=megatron.grad_offload if megatron else False,
        always_on_host=not megatron and layout.backend == "fsdp2" and fsdp.offload_policy,
    )


def with_value_head(shape: ModelShape) -> ModelShape:
    """The same backbone with one output per token."""
    return replace(shape, head=shape.hidden_size, tied=False, vocab_size=1)


def _fsdp_precision(fsdp: FSDPConfig, optim: OptimConfig | None, layout: RoleLayout) -> Precision:
    compute = _bytes(fsdp.mixed_precision.param_dtype)
    # What is never trained is kept in the dtype it computes in.
    master = compute if optim is None else _bytes(fsdp.model_dtype)
    return Precision(
        weights=master,
        gathered=compute,
        gradients=master,
        optimizer=_moments(optim) * master,
        keep_gathered=layout.backend == "fsdp2" and not fsdp.reshard_after_forward,
    )


def _megatron_precision(megatron: MegatronConfig, optim: OptimConfig | None) -> Precision:
    weights = _bytes(megatron.dtype)
    # Moments and, under half-precision weights, a master copy: all fp32.
    optimizer = 4 * _moments(optim) + (4 if weights < 4 and optim is not None else 0)
    return Precision(
        weights=weights,
        gathered=weights,
        gradients=4,
        optimizer=optimizer,
        distributed_optimizer=megatron.use_distributed_optimizer,
    )


def _moments(optim: OptimConfig | None) -> int:
    if optim is None:
        return 0
    if optim.optimizer == "SGD":
        return 1 if optim.momentum else 0
    return 2


def _bytes(dtype: str) -> int:
    return BYTES[full_dtype(dtype)]
