"""The policy's two jobs: log-probs of given responses, and PPO updates. Holds a backend; knows no sharding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.algorithms import (
    BatchCounts,
    agg_loss,
    get_policy_loss_columns,
    get_policy_loss_fn,
    get_policy_loss_selector,
    kl_penalty,
)
from dovetail.algorithms.aggregate import token_share
from dovetail.algorithms.kl import UNBIASED_KL, k3_kl, unbiased_kl
from dovetail.algorithms.plugin_calls import as_policy_loss
from dovetail.algorithms.rollout_correction import MAX_LOG_WEIGHT, interpolate_old_log_prob, off_policy_mask
from dovetail.backends.base import ForwardOptions, LossFn, TokenOutput, TrainBackend
from dovetail.config.actor import ActorConfig
from dovetail.config.algorithm import RolloutCorrectionConfig
from dovetail.config.methods import DistillConfig
from dovetail.config.view import ConfigView
from dovetail.models.vocabulary_divergence import Teacher
from dovetail.parallel.micro_batches import MicroBatchPlan
from dovetail.protocol import DataProto
from dovetail.protocol.routed_experts import by_row
from dovetail.workers.micro_batches import MicroBatchLimit, cut, plan_micro_batches, restore
from dovetail.workers.mini_batches import OWN_OLD_LOG_PROBS, makes_one_step, optimizer_steps
from dovetail.workers.response_columns import (
    MODEL_INPUTS,
    at_responses,
    response_width,
    sampling_temperature,
    take_columns,
)
from dovetail.workers.shares import LOSS_WEIGHT, StepLog, add_shares, global_counts, with_row_weights
from dovetail.workers.teacher_loss import teacher_loss
from dovetail.workers.update_correction import correction_terms

_RATIO, _RATIO_SQUARE = "rollout_corr/ratio_mean", "rollout_corr/ratio_square_mean"
"""Moments of the update's policy / engine over tokens."""
TEACHER_COLUMNS = ("teacher_top_ids", "teacher_top_log_probs", "teacher_hidden")
INTERPOLATION = "interpolation_weights"
"""Column: where each token's old log-prob is between the engine's (0) and the update's (1)."""


class ScoredResponses(NamedTuple):
    """What the current weights say of responses: rows in the order given, on the CPU. None: not asked for."""

    log_probs: Tensor
    entropy: Tensor | None
    sum_squares: Tensor | None
    """The sum of p^2 of each token's distribution."""
    routed_experts: np.ndarray | None
    """The experts that each token of prompt and response was sent to (`protocol.routed_experts`)."""


class PolicyUpdate(NamedTuple):
    """What an update reports, over all data-parallel ranks."""

    metrics: dict[str, float]
    old_log_probs: Tensor | None
    """Of this rank's rows of the first mini-batch, on the CPU, where they came without (`OWN_OLD_LOG_PROBS`)."""


class DataParallelPPOActor:
    """Log-probs and updates of one policy.

    `mini_batch_rows` is what this rank holds of one mini-batch, in sequences; `loss_scale_factor` divides
    `seq-mean-token-sum-norm`. The reference policy is the same class over a backend without optimizer, or over the
    actor's own with `adapters=False` (LoRA switched off). `correction`: what the update itself corrects, where the old
    log-probs are the engine's (`bypass_mode`) or interpolated. `distill` says what is learned from a teacher, where
    the batch has its columns; `teacher` is there when the vocabularies are compared.
    """

    def __init__(
        self,
        config: ActorConfig,
        backend: TrainBackend,
        *,
        mini_batch_rows: int,
        log_prob_limit: MicroBatchLimit,
        loss_scale_factor: float | None = None,
        seed: int = 0,
        adapters: bool = True,
        correction: RolloutCorrectionConfig | None = None,
        distill: DistillConfig | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self._mini_batch_rows = mini_batch_rows
        self._log_prob_limit = log_prob_limit
        self._update_limit = MicroBatchLimit.of_update(config, mini_batch_rows, by_prompt=config.use_prefix_grouper)
        self._loss_scale_factor = loss_scale_factor
        self._distill = distill
        self._teacher = teacher
        self._correction = correction
        self._bypass = correction is not None and correction.bypass_mode
        reinforce = self._bypass and correction is not None and correction.loss_type == "reinforce"
        loss_mode = "reinforce" if reinforce else config.policy_loss.loss_mode
        policy_loss = get_policy_loss_fn(loss_mode)
        self._policy_loss = as_policy_loss(policy_loss, ConfigView(config))
        # Ours have no gradient at a ratio of 1 without advantages; a user's may have terms of its own.
        self._needs_signal = policy_loss.__module__.startswith("dovetail.")
        self._select_tokens = get_policy_loss_selector(loss_mode)
        self._loss_columns = get_policy_loss_columns(loss_mode)
        unbiased = config.use_kl_loss and config.kl_loss_type == UNBIASED_KL
        self._compares_with_engine = unbiased or config.policy_loss.off_policy_mask_threshold is not None
        self._seed = seed
        self._adapters = adapters
        self.num_updates = 0
        """Updates so far; part of a checkpoint, because the order of a shuffle follows from it."""

    def compute_log_prob(self, data: DataProto, calculate_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the responses (and entropies) by the current weights, rows in the order given, on the CPU."""
        scored = self.score_responses(data, entropy=calculate_entropy)
        return scored.log_probs, scored.entropy

    def score_responses(
        self, data: DataProto, *, entropy: bool = False, sum_squares: bool = False, record_experts: bool = False
    ) -> ScoredResponses:
        """Log-probs of the responses, and what else is asked for."""
        asked = {"entropy": entropy, "sum_squares": sum_squares, "record_experts": record_experts}
        names = [*[name for name in ("entropy", "sum_squares") if asked[name]], *["routed_experts"] * record_experts]
        log_probs, *others = self._forward(data, ["log_probs", *names], **asked)
        columns = dict(zip(names, others, strict=True))
        experts = columns.pop("routed_experts", None)
        entropies, squares = (columns[name].float() if name in columns else None for name in ("entropy", "sum_squares"))
        by_rows = None if experts is None else by_row(experts, data.tensors["attention_mask"])
        return ScoredResponses(log_probs.float(), entropies, squares, by_rows)

    def top_tokens(self, data: DataProto, *, top_k: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the responses, and in place of each token the `top_k` most likely ones below `vocab_size`."""
        names = ("log_probs", "top_ids", "top_log_probs")
        log_probs, ids, top = self._forward(data, names, top_k=top_k, top_vocab_size=vocab_size)
        return log_probs.float(), ids.int(), top

    def hidden_states(self, data: DataProto) -> tuple[Tensor, Tensor]:
        """Log-probs of the responses, and `[rows, response_len, width]` what the output layer made them of."""
        log_probs, hidden = self._forward(data, ("log_probs", "hidden"), hidden=True)
        return log_probs.float(), hidden

    def update_policy(self, data: DataProto) -> dict[str, float]:
        """The metrics of `update`."""
        return self.update(data).metrics

    def update(self, data: DataProto) -> PolicyUpdate:
        """PPO epochs over mini-batches, one optimizer step each.

        Without a column `old_log_probs` the update is on-policy: the ratio is 1 and its gradient that of log-probs, so
        no second forward is needed. That holds for the first optimizer step only, so it must be the only one, unless
        no advantage is there for the ratio to weigh. With `OWN_OLD_LOG_PROBS` the column is for all later steps.
        """
        batch = self._training_columns(data)
        options = self._options(data, entropy=self.config.needs_entropy)
        teacher = self._teacher if "teacher_hidden" in batch else None
        options = replace(options, listed="teacher_top_ids" in batch, teacher=teacher)
        distills_alone = self._needs_signal and (options.listed or teacher is not None) and not _has_signal(batch)
        # Where the old log-probs had a pass of their own, the mismatch with the engine is known before the update.
        reports_mismatch = self._bypass or "old_log_probs" not in batch
        log = StepLog("actor")
        steps = optimizer_steps(batch, self._mini_batch_rows, self.config, seed=self._seed + self.num_updates)
        own: list[Tensor] = []
        old_log_probs: Tensor | None = None
        for index, mini_batch in enumerate(steps):
            is_own = index == 0 and OWN_OLD_LOG_PROBS in data.meta_info
            if is_own:
                mini_batch.pop(["old_log_probs"])
            counts = global_counts(mini_batch, self.backend)
            plan = plan_micro_batches(mini_batch, self._update_limit, self.backend)
            if self._select_tokens is not None:
                mini_batch = self._with_selection(mini_batch, plan, options)
            loss_fn = self._loss_fn(
                counts, distills_alone, log_probs=own if is_own else None, reports_mismatch=reports_mismatch
            )
            parts = self.backend.forward_backward(cut(mini_batch, plan), loss_fn, options)
            # The schedule counts training steps, as users set it, not the optimizer steps inside one.
            step = self.backend.optim_step(advance_schedule=index == len(steps) - 1)
            log.add(add_shares(parts, self.backend), step)
            if is_own:
                old_log_probs = restore(own, plan).float()
        self.num_updates += 1
        metrics = log.result()
        if _RATIO_SQUARE in metrics:
            ratio, square = metrics.pop(_RATIO), metrics.pop(_RATIO_SQUARE)
            metrics["rollout_corr/eff_sample_size"] = ratio**2 / square if square else 0.0
        if self.config.use_kl_loss:
            metrics["actor/kl_coef"] = self.config.kl_loss_coef
        return PolicyUpdate(metrics, None if old_log_probs is None else old_log_probs.cpu())

    def _forward(self, data: DataProto, names: Sequence[str], **asked: Any) -> list[Tensor]:
        """These outputs at the responses (experts: of all tokens), rows in the order given, on the CPU."""
        batch = take_columns(data, MODEL_INPUTS)
        plan = plan_micro_batches(batch, self._log_prob_limit, self.backend)
        options = replace(self._options(data, entropy=False), **asked)
        outputs = self.backend.forward(cut(batch, plan), options)
        width = response_width(batch)

        def column(name: str) -> Tensor:
            parts = [getattr(output, name) for output in outputs]
            if name == "routed_experts":  # larger than all else: joined where there is room
                return restore([part.cpu() for part in parts], plan)
            return restore([at_responses(part, width) for part in parts], plan).cpu()

        return [column(name) for name in names]

    def _options(self, data: DataProto, *, entropy: bool) -> ForwardOptions:
        return ForwardOptions(
            temperature=sampling_temperature(data),
            entropy=entropy,
            last_tokens=response_width(data),
            adapters=self._adapters,
        )

    def _training_columns(self, data: DataProto) -> DataProto:
        names = [*MODEL_INPUTS, "response_mask", "advantages"]
        if "old_log_probs" in data:
            names.append("old_log_probs")
        elif INTERPOLATION in data:
            names += [INTERPOLATION, "rollout_log_probs"]
        elif (self.config.ppo_epochs > 1 or not makes_one_step(data, self._mini_batch_rows)) and bool(
            data.tensors["advantages"].any()
        ):
            raise ValueError(
                f"update_policy got no column old_log_probs, but {len(data)} rows in mini-batches of "
                f"{self._mini_batch_rows} and ppo_epochs={self.config.ppo_epochs} make more than one optimizer step; "
                "call compute_log_prob first."
            )
        elif "rollout_log_probs" in data:
            # Without a log-prob pass of its own, the mismatch between engine and trainer is measured in the update.
            names.append("rollout_log_probs")
        if self._compares_with_engine and "rollout_log_probs" in data and "rollout_log_probs" not in names:
            names.append("rollout_log_probs")
        if self.config.use_kl_loss or (self._distill is not None and self._distill.is_estimate):
            names.append("ref_log_prob")
        names += [name for name in ("rollout_is_weights", LOSS_WEIGHT, *TEACHER_COLUMNS) if name in data]
        return take_columns(data, [*names, *self._loss_columns])

    def _loss_fn(
        self,
        mini_batch_counts: BatchCounts,
        distills_alone: bool,
        *,
        reports_mismatch: bool,
        log_probs: list[Tensor] | None = None,
    ) -> LossFn:
        """The loss of one optimizer step. Adds what each micro-batch has to `log_probs`."""
        config = self.config
        mode, scale = config.loss_agg_mode, self._loss_scale_factor

        def loss_fn(output: TokenOutput, micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
            columns = micro_batch.tensors
            counts = with_row_weights(mini_batch_counts, micro_batch)
            mask, width = columns["response_mask"], response_width(micro_batch)
            log_prob = at_responses(output.log_probs, width)
            if log_probs is not None:
                log_probs.append(log_prob.detach())
            weights, full_mask = columns.get("rollout_is_weights"), mask
            old_log_prob = _old_log_prob(columns, log_prob.detach())
            engine = columns["old_log_probs"] if self._bypass else columns.get("rollout_log_probs")
            if self._correction is not None:
                policy = log_prob.detach() if self._bypass else old_log_prob
                assert engine is not None, "a batch of stale responses has the engine's log-probs"
                mask, weights = correction_terms(policy, engine, mask, self._correction)
            sampler = old_log_prob if engine is None else engine.to(log_prob.device)
            advantages, dropped = self._advantages(columns["advantages"], log_prob.detach(), sampler, full_mask)
            loss, metrics = self._policy_loss(
                old_log_prob=old_log_prob,
                # Without a gradient to give, the sampled tokens' log-probs need no backward through the output layer.
                log_prob=log_prob.detach() if distills_alone else log_prob,
                advantages=advantages,
                response_mask=mask,
                rollout_is_weights=weights,
                loss_selection=columns.get("loss_selection"),
                counts=counts,
                **{name: micro_batch.columns[name] for name in self._loss_columns},
                **self._loss_settings(),
            )
            metrics = {"actor/pg_loss": loss.detach(), **metrics}
            if dropped is not None:
                metrics["actor/off_policy_masked_fraction"] = token_share(dropped.float(), full_mask, counts)
            if output.routing_changed is not None:
                changed = at_responses(output.routing_changed, width)
                metrics["actor/routing_changed_share"] = token_share(changed, full_mask, counts)
            if engine is not None and reports_mismatch:
                metrics |= _engine_mismatch(log_prob.detach(), engine, full_mask, counts)
            if self._correction is not None and self._correction.rollout_rs is not None:
                rejected = full_mask.float() - mask.float()
                metrics["rollout_corr/rollout_rs_masked_fraction"] = token_share(rejected, full_mask, counts)
            if output.entropy is not None:
                entropies = at_responses(output.entropy, width)
                entropy = agg_loss(entropies, mask, mode, counts=counts, loss_scale_factor=scale)
                loss = loss - config.entropy_coeff * entropy
                # Nats per token, as the pass for the old log-probs reports it, however the loss adds tokens up.
                metrics["actor/entropy"] = token_share(entropies.detach(), full_mask, counts)
            if config.use_kl_loss:
                token_kl = self._token_kl(log_prob, columns["ref_log_prob"], sampler)
                kl = agg_loss(token_kl, mask, mode, counts=counts, loss_scale_factor=scale)
                loss = loss + config.kl_loss_coef * kl
                metrics["actor/kl_loss"] = kl.detach()
            if self._distill is not None and (taught := teacher_loss(output, columns, self._distill)) is not None:
                kl = agg_loss(taught.loss, mask, mode, counts=counts, loss_scale_factor=scale)
                loss = loss + self._distill.kl_coef * kl
                metrics |= {name: token_share(value, full_mask, counts) for name, value in taught.metrics.items()}
            return loss, metrics

        return loss_fn

    def _advantages(
        self, advantages: Tensor, log_prob: Tensor, sampling_log_prob: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Without those of `off_policy_mask`, which a loss then gives no gradient. And which tokens these are."""
        threshold = self.config.policy_loss.off_policy_mask_threshold
        if threshold is None:
            return advantages, None
        dropped = off_policy_mask(log_prob, sampling_log_prob, advantages, mask, threshold)
        return advantages.masked_fill(dropped, 0.0), dropped

    def _token_kl(self, log_prob: Tensor, ref_log_prob: Tensor, sampling_log_prob: Tensor) -> Tensor:
        if self.config.kl_loss_type == UNBIASED_KL:
            return unbiased_kl(log_prob, ref_log_prob, sampling_log_prob)
        return kl_penalty(log_prob, ref_log_prob, self.config.kl_loss_type)

    def _loss_settings(self) -> dict[str, Any]:
        config = self.config
        return {
            "loss_agg_mode": config.loss_agg_mode,
            "loss_scale_factor": self._loss_scale_factor,
            "clip_ratio": config.clip_ratio,
            "clip_ratio_low": config.clip_low,
            "clip_ratio_high": config.clip_high,
            "clip_ratio_c": config.clip_ratio_c,
            "tau_pos": config.tau_pos,
            "tau_neg": config.tau_neg,
            **config.policy_loss.model_dump(exclude={"loss_mode", "off_policy_mask_threshold"}),
        }

    def _with_selection(self, mini_batch: DataProto, plan: MicroBatchPlan, options: ForwardOptions) -> DataProto:
        """Add `loss_selection`: tokens chosen by comparing the mini-batch's tokens over all ranks."""
        assert self._select_tokens is not None, "only called for losses that select tokens"
        columns = mini_batch.tensors
        outputs = self.backend.forward(cut(mini_batch, plan), replace(options, entropy=False))
        width = response_width(mini_batch)
        log_prob = restore([at_responses(output.log_probs, width) for output in outputs], plan).float()
        old_log_prob = _old_log_prob(columns, log_prob)
        own = [old_log_prob, log_prob, columns["advantages"].to(log_prob), columns["response_mask"].to(log_prob)]
        gathered = [_gather_rows(column, self.backend.dp_group) for column in own]
        # Rows in an order of their own: a random choice must not depend on which rank holds which row.
        keys = _row_keys(columns["input_ids"], columns["attention_mask"]).to(log_prob.device)
        keys = _gather_rows(keys, self.backend.dp_group)
        order = keys.argsort(stable=True)
        chosen = self._select_tokens(
            *(column[order] for column in gathered), seed=self._seed + self.num_updates, **self._loss_settings()
        )
        selection = chosen[order.argsort()]
        first = self.backend.rank_info.dp_rank * len(mini_batch)
        own_rows = selection[first : first + len(mini_batch)].cpu()
        return mini_batch.union(DataProto.from_dict({"loss_selection": own_rows}))


def _old_log_prob(columns: Mapping[str, Tensor], log_prob: Tensor) -> Tensor:
    """The column, or between the engine's and the update's, or the update's own."""
    alpha = columns.get(INTERPOLATION)
    if alpha is not None:
        engine = columns["rollout_log_probs"].to(log_prob.device)
        return interpolate_old_log_prob(log_prob, engine, alpha.to(log_prob.device))
    return columns.get("old_log_probs", log_prob).to(log_prob.device)


def _has_signal(batch: DataProto) -> bool:
    """Whether the policy loss may have a gradient: advantages, or old log-probs that are not the update's own."""
    return "old_log_probs" in batch or INTERPOLATION in batch or bool(batch.tensors["advantages"].any())


def _row_keys(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """One number a row that depends on its tokens alone, not on padding (a polynomial hash, modulo 2**64)."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(2**62, (input_ids.shape[1],), generator=generator).to(input_ids.device)
    return (input_ids * attention_mask * factors).sum(dim=1)


def _engine_mismatch(log_prob: Tensor, engine_log_prob: Tensor, mask: Tensor, counts: BatchCounts) -> dict[str, Tensor]:
    """Shares of the means over tokens that `compute_offpolicy_metrics` reports of a whole batch.

    The two moments of the ratio become the effective sample size when they are complete.
    """
    log_ratio = log_prob.float() - engine_log_prob
    ratio = log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    return {
        _RATIO: token_share(ratio, mask, counts),
        _RATIO_SQUARE: token_share(ratio.square(), mask, counts),
        "rollout_corr/kl": token_share(-log_ratio, mask, counts),
        "rollout_corr/k3_kl": token_share(k3_kl(log_ratio), mask, counts),
        "rollout_corr/probs_diff_mean": token_share((log_prob.exp() - engine_log_prob.exp()).abs(), mask, counts),
    }


def _gather_rows(column: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return column
    parts = [torch.empty_like(column) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, column.contiguous(), group=group)
    return torch.cat(parts)
