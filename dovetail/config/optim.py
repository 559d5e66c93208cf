"""`*.optim.*`: the optimizer and its learning-rate schedule, the same keys for every backend."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from dovetail.config.base import Section, key, read_with, unsupported, unused, when_is

_SCHEDULE = "lr_scheduler_type"


class OptimConfig(Section):
    """Optimizer of the actor; the critic has its own learning rate."""

    rules = (
        read_with(".optimizer", "SGD", only="momentum"),
        read_with(".optimizer", "Muon", only="muon_*"),
        unused("{section}.optimizer=SGD has none", when_is("optimizer", "SGD"), only="betas eps"),
        read_with(f".{_SCHEDULE}", "wsd", only="lr_wsd_*"),
        read_with(f".{_SCHEDULE}", "cosine", only="num_cycles"),
        unused("a constant rate does not decay", when_is(_SCHEDULE, "constant"), only="min_lr* lr_decay_steps"),
        unused("{section}.lr_warmup_steps asks for no warm-up", when_is("has_warmup", False), only="lr_warmup_init"),
        unsupported(
            "fsdp and megatron flatten or split the matrices that Muon needs whole; use strategy=fsdp2, or AdamW",
            "Muon",
            when=when_is("strategy", "megatron", "fsdp"),
            only="optimizer",
        ),
    )

    optimizer: Literal["AdamW", "Adam", "SGD", "Muon"] = key(
        "AdamW",
        "Optimizer. Muon is for the matrices of the layers (single, fsdp2), AdamW steps the rest.",
        reads={"adam": "AdamW", "adamw": "AdamW", "sgd": "SGD"},
    )
    lr: float = key(1e-6, "Peak learning rate.", ge=0)
    betas: tuple[float, float] = key((0.9, 0.999), "Decay of the two Adam moments.")
    eps: float = key(1e-8, "Adam's epsilon.", gt=0, le=1)
    momentum: float = key(0.0, "Momentum of SGD.", ge=0, lt=1)
    muon_momentum: float = key(0.95, "Momentum of Muon.", ge=0, lt=1)
    muon_nesterov: bool = key(True, "Nesterov's momentum in Muon.")
    muon_num_ns_steps: int = key(5, "Newton-Schulz steps of Muon.", ge=1, le=20)
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] = key(
        "original", "Step size of Muon: by the matrix's shape, or as large as AdamW's, so that its learning rates fit."
    )
    weight_decay: float = key(0.01, "Decoupled weight decay.", ge=0, le=1000)
    lr_scheduler_type: Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"] = key(
        "constant",
        "Shape of the schedule after the warm-up.",
        was="warmup_style lr_decay_style lr_scheduler",
        reads={"WSD": "wsd", "inverse-square-root": "inverse_square_root"},
    )
    lr_warmup_steps: int = key(-1, "Warm-up in training steps; -1: `lr_warmup_steps_ratio`.", ge=-1)
    lr_warmup_steps_ratio: float = key(0.0, "Warm-up as a share of all steps.", was="lr_warmup_ratio", ge=0, le=1)
    lr_warmup_init: float = key(0.0, "Learning rate at the first step of the warm-up.", ge=0)
    min_lr: float | None = key(None, "Lowest learning rate. Null: `lr` x `min_lr_ratio`.", ge=0)
    min_lr_ratio: float = key(0.0, "Lowest learning rate as a share of `lr`.", was="min_lr_factor", ge=0, le=1)
    num_cycles: float = key(0.5, "Cosine cycles until the end; 0.5 goes down once.", gt=0)
    lr_decay_steps: int | None = key(None, "Step at which the schedule ends. Null: `total_training_steps`.", ge=1)
    lr_wsd_decay_steps: int | None = key(None, "Length of the final decay of `wsd`, in steps.", ge=1)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine"] = key("exponential", "Final decay of `wsd`.")
    total_training_steps: int = key(-1, "Length of the schedule; -1: filled in by the trainer.", ge=-1)
    override_optimizer_config: dict[str, Any] | None = key(None, "Extra arguments of the optimizer.")

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
    def has_warmup(self) -> bool:
        """Whether a long run warms up."""
        return self.warmup_steps(1_000_000) > 0

    @property
    def lowest_lr(self) -> float:
        """Learning rate that the schedule ends at."""
        return self.lr * self.min_lr_ratio if self.min_lr is None else self.min_lr


class CriticOptimConfig(OptimConfig):
    """Optimizer of the critic: the same keys with a larger learning rate."""

    lr: float = key(1e-5, "Peak learning rate.", ge=0)
