"""Floating-point operations of a step and the share of the devices' peak they reach: `perf/mfu/*`.

Counted are the products that the model asks for: weights times tokens, and attention between a token and those before
it. What is computed again to save memory (gradient checkpointing), norms, activations and vision towers is not counted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dovetail.config.fsdp import full_dtype
from dovetail.config.plan import read_shapes
from dovetail.config.plan.model_shape import ModelShape
from dovetail.config.root import DovetailConfig
from dovetail.controller import WorkerGroup
from dovetail.protocol import DataProto

logger = logging.getLogger(__name__)

# Phase of a step -> name under perf/mfu. `actor_infer` is the pass for the old log-probs.
_PASSES = {
    "old_log_prob": "actor_infer",
    "ref": "ref",
    "values": "critic_infer",
    "update_actor": "actor",
    "update_critic": "critic",
}


class StepUtilisation:
    """`perf/mfu/*` of a run's steps. A peak or a model shape that is not known leaves the metrics out."""

    def __init__(self, config: DovetailConfig) -> None:
        self._config = config
        self._shapes = read_shapes(config)
        self._peaks: dict[str, float | None] = {}
        self._generated = 0.0
        self.unscored: Tensor | None = None
        """Bool `[rows]`: those of the step that its pass for old log-probs leaves out."""

    def ask_peaks(self, trains: WorkerGroup, generates: WorkerGroup | None = None) -> None:
        """The peak of all devices together: configured, published for a GPU, measured on a CPU."""
        policy = self._config.actor_rollout_ref
        trained = self._config.critic if self._config.trainer.method == "reward" else policy.actor
        dtype = full_dtype(trained.compute_dtype)
        self._peaks = {"training": self._peak(trains, dtype)}
        if generates is not None:
            self._peaks["generation"] = self._peak(generates, full_dtype(policy.rollout.dtype))
        if None in self._peaks.values():
            logger.info(
                "perf/mfu is not reported: the peak of this device is not known; set trainer.device_peak_tflops"
            )

    def count_generation(self, answers: DataProto) -> None:
        """Called with every batch an engine has written in this step."""
        if self._shapes.policy is not None:
            self._generated += generation_flops(self._shapes.policy, answers)

    def take(self, batch: DataProto, seconds: Mapping[str, float]) -> dict[str, float]:
        """The metrics of the step that ends; counting starts again."""
        config, shapes = self._config, self._shapes
        generated, self._generated = self._generated, 0.0
        unscored, self.unscored = self.unscored, None
        metrics: dict[str, float] = {}
        training, generation = self._peaks.get("training"), self._peaks.get("generation")
        # Engines on devices of their own generate all the time; `gen` is then only the wait for groups.
        apart = config.async_training.mode != "off" and not config.actor_rollout_ref.hybrid_engine
        spent = seconds.get("step" if apart else "gen")
        if generation is not None and generated and spent:
            metrics["perf/mfu/rollout"] = generated / spent / generation
        if training is not None and shapes.policy is not None:
            flops = pass_flops(
                batch,
                policy=shapes.policy,
                critic=shapes.critic,
                teacher=shapes.teacher,
                actor_epochs=config.actor_rollout_ref.actor.ppo_epochs,
                critic_epochs=config.critic.ppo_epochs,
                adapters_only=config.actor_rollout_ref.model.uses_lora,
                critic_adapters_only=config.critic.model.uses_lora,
                shares_prompts=config.actor_rollout_ref.actor.use_prefix_grouper,
                unscored=unscored,
            )
            if config.algorithm.rollout_correction.bypass_mode:
                flops.pop("old_log_prob", None)  # the engine's log-probs are copied
            if config.teacher_devices or config.distill.teachers:
                flops.pop("ref", None)  # the peak is that of the student's devices, and a row has one of the teachers
            metrics |= utilisation(flops, seconds, training)
            metrics["perf/peak_tflops"] = training / 1e12
        return metrics

    def of_update(
        self, phase: str, lengths: Sequence[int], num_head_tokens: int, seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """The metrics of a step that is one update of the policy, on rows of these lengths."""
        peak, shape = self._peaks.get("training"), self._shapes.policy
        if peak is None or shape is None:
            return {}
        config = self._config
        trained = config.critic.model if config.trainer.method == "reward" else config.actor_rollout_ref.model
        passes = 2 if trained.uses_lora else 3
        flops = passes * forward_flops(shape, lengths, num_head_tokens)
        return utilisation({phase: flops}, seconds, peak) | {"perf/peak_tflops": peak / 1e12}

    def _peak(self, group: WorkerGroup, dtype: str) -> float | None:
        if self._config.trainer.device_peak_tflops is not None:
            return self._config.trainer.device_peak_tflops * 1e12 * group.world_size
        peaks: list[float | None] = group.device_peak(dtype)
        known = [peak for peak in peaks if peak is not None]
        return sum(known) if len(known) == len(peaks) else None


def forward_flops(shape: ModelShape, lengths: Sequence[int], num_head_tokens: int) -> float:
    """One forward pass over sequences of these lengths; the vocabulary head reads `num_head_tokens` of the tokens."""
    attention_width = shape.num_heads * shape.head_dim * shape.num_layers
    # Two products (scores, then values) of 2 FLOPs each, and a token sees half of the square: 2 x n^2 x width.
    attention = sum(2.0 * length * length * attention_width for length in lengths)
    return 2.0 * _layer_weights(shape) * sum(lengths) + attention + 2.0 * _head_weights(shape) * num_head_tokens


def generation_flops(shape: ModelShape, answers: DataProto) -> float:
    """What an engine must compute: each prompt once, however many answers it gets, then every answer token by token."""
    prompts, responses = _lengths(answers)
    whole = prompts + responses
    total = forward_flops(shape, whole.tolist(), int(responses.sum()))
    return total - forward_flops(shape, _prompts_seen_again(answers), 0)


def _prompts_seen_again(batch: DataProto) -> list[int]:
    """Tokens of the prompts of all rows but the first of each group."""
    seen: set[str] = set()
    again: list[int] = []
    for uid, length in zip(map(str, batch.non_tensor_batch["uid"]), _lengths(batch)[0].tolist(), strict=True):
        if uid in seen:
            again.append(length)
        seen.add(uid)
    return again


def pass_flops(
    batch: DataProto,
    *,
    policy: ModelShape,
    critic: ModelShape | None,
    teacher: ModelShape | None = None,
    actor_epochs: int,
    critic_epochs: int,
    adapters_only: bool,
    critic_adapters_only: bool = False,
    shares_prompts: bool = False,
    unscored: Tensor | None = None,
) -> dict[str, float]:
    """FLOPs of every phase that runs a model over `batch`, by phase. A backward pass costs two forward passes.

    Frozen weights need no gradient of their own: with adapters a backward pass costs one. `shares_prompts`: the policy
    and its reference compute a prompt once for all its responses. `unscored` are the rows that the pass for old
    log-probs leaves out.
    """

    def forward(shape: ModelShape, rows: DataProto) -> float:
        prompts, responses = _lengths(rows)
        flops = forward_flops(shape, (prompts + responses).tolist(), int(responses.sum()))
        return flops - (forward_flops(shape, _prompts_seen_again(rows), 0) if shares_prompts else 0.0)

    whole = forward(policy, batch)
    flops = {
        "old_log_prob": whole if unscored is None else forward(policy, batch.select_idxs(~unscored)),
        "ref": whole if teacher is None else forward(teacher, batch),
        "update_actor": whole * (2 if adapters_only else 3) * actor_epochs,
    }
    if critic is not None:
        prompts, responses = _lengths(batch)
        value = forward_flops(critic, (prompts + responses).tolist(), 0)
        flops |= {"values": value, "update_critic": (2 if critic_adapters_only else 3) * value * critic_epochs}
    return flops


def utilisation(flops: Mapping[str, float], seconds: Mapping[str, float], peak: float) -> dict[str, float]:
    """`perf/mfu/*` of the phases that took time; `peak` is that of all devices together."""
    return {
        f"perf/mfu/{_PASSES[phase]}": count / seconds[phase] / peak
        for phase, count in flops.items()
        if seconds.get(phase, 0.0) > 0
    }


def _layer_weights(shape: ModelShape) -> float:
    """Weights that a token is multiplied with in the decoder layers."""
    dense = sum(layer.dense - layer.norms for layer in shape.layers)
    routed = sum(layer.routed_experts for layer in shape.layers)
    return dense + (routed * shape.experts_per_token / shape.num_experts if routed else 0.0)


def _head_weights(shape: ModelShape) -> int:
    return shape.vocab_size * shape.hidden_size


def _lengths(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Prompt and response tokens of every row."""
    attention = batch.tensors["attention_mask"].to(torch.int64)
    width = batch.tensors["responses"].shape[1]
    return attention[:, :-width].sum(dim=1), attention[:, -width:].sum(dim=1)
