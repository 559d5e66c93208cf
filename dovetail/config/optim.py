"""`*.optim.*`: the optimizer and its learning-rate schedule, the same keys for every backend."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from dovetail.config.base import Section


class OptimConfig(Section):
    """Optimizer of the actor; the critic has its own learning rate."""

    optimizer: Literal["AdamW", "Adam", "SGD", "Muon"] = Field(
        "AdamW", description="Optimizer. Muon is for the matrices of the layers (single, fsdp2), AdamW steps the rest."
    )
    lr: float = Field(1e-6, ge=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of the two Adam moments.")
    eps: float = Field(1e-8, gt=0, le=1, description="Adam's epsilon.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of SGD.")
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="Momentum of Muon.")
    muon_nesterov: bool = Field(True, description="Nesterov's momentum in Muon.")
    muon_num_ns_steps: int = Field(5, ge=1, le=20, description="Newton-Schulz steps of Muon.")
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] = Field(
        "original",
        description="Step size of Muon: by the matrix's shape, or as large as AdamW's, so that its learning rates fit.",
    )
    weight_decay: float = Field(0.01, ge=0, le=1000, description="Decoupled weight decay.")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"] = Field(
        "constant", description="Shape of the schedule after the warm-up."
    )
    lr_warmup_steps: int = Field(-1, ge=-1, description="Warm-up in training steps; -1: `lr_warmup_steps_ratio`.")
    lr_warmup_steps_ratio: float = Field(0.0, ge=0, le=1, description="Warm-up as a share of all training steps.")
    lr_warmup_init: float = Field(0.0, ge=0, description="Learning rate at the first step of the warm-up.")
    min_lr: float | None = Field(None, ge=0, description="Lowest learning rate. Null: `lr` x `min_lr_ratio`.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Lowest learning rate as a share of `lr`.")
    num_cycles: float = Field(0.5, gt=0, description="Cosine cycles until the end; 0.5 goes down once.")
    lr_decay_steps: int | None = Field(
        None, ge=1, description="Step at which the schedule ends. Null: `total_training_steps`."
    )
    lr_wsd_decay_steps: int | None = Field(None, ge=1, description="Length of the final decay of `wsd`, in steps.")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine"] = Field(
        "exponential", description="Shape of the final decay of `wsd`."
    )
    total_training_steps: int = Field(-1, ge=-1, description="Length of the schedule; -1: filled in by the trainer.")
    override_optimizer_config: dict[str, Any] | None = Field(
        None, description="Extra arguments of the optimizer's constructor (free-form)."
    )

    @field_validator("betas")
    @classmethod
    def _decay_is_a_share(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each beta must be at least 0 and below 1, e.g. (0.9, 0.999).")
        return betas

    def warmup_steps(self, total_steps: int) -> int:
        """Steps of warm-up in a run of `total_steps`."""
        return self.lr_warmup_steps if self.lr_warmup_steps >= 0 else int(self.lr_warmup_steps_ratio * total_steps)

    @property
    def lowest_lr(self) -> float:
        """Learning rate that the schedule ends at."""
        return self.lr * self.min_lr_ratio if self.min_lr is None else self.min_lr


class CriticOptimConfig(OptimConfig):
    """Optimizer of the critic: the same keys with a larger learning rate."""

    lr: float = Field(1e-5, ge=0, description="Peak learning rate.")
