"""A policy: the log-probability of every token of a batch, and the entropy it was drawn with.

`PolicyModel` wraps a causal language model (or one that also sees images). The head is applied only where a log-prob is
wanted, by the plain or the fused path. Knows nothing of advantages or losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dovetail.models.backbone import (
    TransformerBackbone,
    checked_layer,
    predicting_positions,
    refuse_layers_before_the_head,
)
from dovetail.models.exact import ExactLinear, log_probs_with_gradient
from dovetail.models.head import (
    EntropyMemory,
    Float32Head,
    ListedLabels,
    LogProbs,
    TokenLists,
    TopTokens,
    chunk_rows,
    fused_linear_log_prob,
    kept_log_probs,
    listed_log_probs,
    plain_log_prob_entropy,
)
from dovetail.models.logits import logit_transform
from dovetail.models.router_replay import RouterReplay
from dovetail.models.token_batch import Reads, TokenBatch
from dovetail.models.vocabulary_divergence import OutputLayer, Teacher, divergence_from


class PolicyOutput(NamedTuple):
    """A tuple, not a dataclass: FSDP2 looks for tensors in the output to hang its backward hooks on."""

    log_probs: Tensor
    """`[B, T]` float32: log p(token t | tokens before t). 0 for padding, the first token and unwanted tokens."""
    entropy: Tensor | None
    """`[B, T]` float32: entropy of the distribution token t was drawn from; `None` when not asked for."""
    best: Tensor | None = None
    """`[B, T]` float32: log p of the most likely token in place of token t; `None` when not asked for."""
    sum_squares: Tensor | None = None
    """`[B, T]` float32: sum of p^2 over the vocabulary at token t, without a gradient; `None` when not asked for."""
    top: TopTokens | None = None
    """`[B, T, k]`: the most likely tokens in place of token t, without a gradient; `None` when not asked for."""
    listed: Tensor | None = None
    """`[B, T, k]` float32: log p of the tokens listed for token t; `None` when none were."""
    overlap: Tensor | None = None
    """`[B, T]` float32: share of the listed tokens that are among the k most likely ones; `None` like `listed`."""
    hidden: Tensor | None = None
    """`[B, T, H]`: the last hidden state before token t, which the output layer reads; `None` when not asked for."""
    divergence: Tensor | None = None
    """`[B, T]` float32: from the teacher's distribution of token t; `None` without a teacher."""
    routed_experts: Tensor | None = None
    """`[B, T, layers, k]`: the experts that token t was sent to; `None` when not asked for."""
    routing_changed: Tensor | None = None
    """`[B, T]` float32: share of the replayed experts that the routers would not choose, where token t is predicted;
    `None` without replay."""


class PolicyModel(TransformerBackbone):
    """Token log-probs of a transformers causal LM. Responses are the last columns: `log_probs[:, -R:]`."""

    def __init__(
        self,
        hf_model: Any,
        *,
        use_remove_padding: bool = True,
        share_prefixes: bool = False,
        router_replay: RouterReplay | None = None,
        use_fused_kernels: bool = False,
        head_chunk_size: int | None = None,
        use_triton: bool | None = None,
        chunk_entropy: bool = False,
        recompute_entropy: bool = False,
        keep_head_gradient: bool | None = None,
    ) -> None:
        """`use_triton` and `keep_head_gradient` are for the fused head: see `fused_linear_log_prob`.

        `chunk_entropy` and `recompute_entropy` save memory on the entropy of the plain head (`EntropyMemory`); the
        fused one holds no logits.
        """
        super().__init__(
            hf_model,
            use_remove_padding=use_remove_padding,
            share_prefixes=share_prefixes,
            router_replay=router_replay,
        )
        refuse_layers_before_the_head(hf_model)
        self.use_fused_kernels = use_fused_kernels
        self.head_chunk_size = head_chunk_size
        self.use_triton = use_triton
        self.chunk_entropy = chunk_entropy
        self.recompute_entropy = recompute_entropy
        self.keep_head_gradient = keep_head_gradient
        # Models that scale or cap their logits do it after the head: the factor joins the temperature.
        self._logit_scale, self._softcap = logit_transform(hf_model)
        if use_fused_kernels and self._softcap:
            raise ValueError(
                f"{type(hf_model).__name__} caps its logits (final_logit_softcapping={self._softcap}), which the fused "
                "head does not compute; set use_fused_kernels=False."
            )

    def forward(
        self,
        batch: TokenBatch,
        *,
        temperature: float = 1.0,
        need_entropy: bool = False,
        need_best: bool = False,
        need_sum_squares: bool = False,
        lists: TokenLists | None = None,
        need_hidden: bool = False,
        teacher: Teacher | None = None,
        kept_ids: Tensor | None = None,
        record_experts: bool = False,
        multi_modal_inputs: Mapping[str, Tensor] | None = None,
    ) -> PolicyOutput:
        """`batch`: what `prepare` made, on the device.

        The ids of `lists` are `[B, T, k]`, and hidden states of a `teacher` `[B, T, H]`, those of token t in place t.
        With `kept_ids`, `[B, T, k]` and -1 after the last, token t has been drawn from these alone: its log-prob and
        all else about its distribution are of what the model says about them.
        """
        states = self.hidden_states(batch, multi_modal_inputs, record_experts=record_experts)[batch.states]
        routing, changed = self.router_replay, None
        if routing is not None and batch.routed_experts is not None:
            changed = routing.changed()[batch.states]
        if kept_ids is None:
            head = self._head(states, batch.labels, temperature, need_entropy, need_best, need_sum_squares)
        else:
            head = kept_log_probs(
                states, *self._plain_layer(), batch.labels, batch.at_targets(kept_ids),
                temperature=temperature / self._logit_scale, softcap=self._softcap, chunk_size=self.head_chunk_size,
            )  # fmt: skip
            head = LogProbs(
                head.log_probs,
                head.entropy if need_entropy else None,
                head.best if need_best else None,
                head.sum_squares if need_sum_squares else None,
            )
        if lists is not None:
            ids = None if lists.ids is None else batch.at_targets(lists.ids)
            head = head._replace(**self._lists(states, lists._replace(ids=ids), temperature)._asdict())
        divergence = None
        if teacher is not None:
            assert teacher.hidden is not None, "the batch has the teacher's hidden states"
            of_rows = batch.at_targets(teacher.hidden)
            own = OutputLayer(*self._plain_layer(), self._logit_scale, self._softcap)
            divergence = divergence_from(
                states, own, replace(teacher, hidden=of_rows), temperature=temperature,
                chunk_size=self.head_chunk_size,
            )  # fmt: skip

        def spread(values: Tensor | None) -> Any:
            return None if values is None else batch.spread(values)

        return PolicyOutput(
            spread(head.log_probs),
            spread(head.entropy),
            spread(head.best),
            spread(head.sum_squares),
            None if head.top is None else TopTokens(*map(spread, head.top)),
            spread(head.listed),
            spread(head.overlap),
            spread(states) if need_hidden else None,
            spread(divergence),
            batch.in_padded(routing.recorded()) if routing is not None and record_experts else None,
            spread(changed),
        )

    def _reads(self, attention_mask: Tensor, token_mask: Tensor | None) -> Reads:
        rows, columns = predicting_positions(attention_mask, token_mask).nonzero(as_tuple=True)
        return Reads(rows, columns, (rows, columns + 1), tuple(attention_mask.shape))

    def _plain_layer(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the head."""
        layer = checked_layer(self.hf_model.get_output_embeddings())
        if not _is_plain(layer):
            raise ValueError(
                "whole distributions and those of sampling masks are computed from a plain linear head, this model has "
                f"{type(layer).__name__}; keep the head out of the LoRA targets, or use distill.kl=sampled and "
                "rollout.keep_sampling_mask=False."
            )
        return layer.weight, layer.bias

    def _lists(self, hidden: Tensor, lists: TokenLists, temperature: float) -> ListedLabels:
        return listed_log_probs(
            hidden,
            *self._plain_layer(),
            lists,
            temperature=temperature / self._logit_scale,
            softcap=self._softcap,
            chunk_size=self.head_chunk_size,
        )

    def _head(
        self,
        hidden: Tensor,
        labels: Tensor,
        temperature: float,
        need_entropy: bool,
        need_best: bool,
        need_sum_squares: bool,
    ) -> LogProbs:
        layer = self.hf_model.get_output_embeddings()
        if layer is None:
            raise ValueError(f"{type(self.hf_model).__name__} has no language-model head.")
        layer = checked_layer(layer)
        if isinstance(layer, ExactLinear):
            if self._logit_scale != 1 or self._softcap:
                raise ValueError(f"{type(self.hf_model).__name__} changes its logits; set rollout.exact=False for it.")
            return _exact_head(layer, hidden, labels, temperature, need_entropy, need_best, need_sum_squares)
        temperature = temperature / self._logit_scale
        if self.use_fused_kernels and not need_best:
            if not _is_plain(layer):
                raise ValueError(
                    f"the fused head needs a plain linear layer, this model has {type(layer).__name__}; "
                    "set use_fused_kernels=False, or keep the head out of the LoRA targets."
                )
            return fused_linear_log_prob(
                hidden,
                layer.weight,
                labels,
                bias=layer.bias,
                temperature=temperature,
                need_entropy=need_entropy,
                chunk_size=self.head_chunk_size,
                use_triton=self.use_triton,
                need_sum_squares=need_sum_squares,
                keep_gradient=self.keep_head_gradient,
            )
        logits = layer(hidden)
        if self._softcap:
            logits = torch.tanh(logits.float() / self._softcap) * self._softcap
        chunk_size = (
            (self.head_chunk_size or chunk_rows(logits.size(-1), logits.device)) if self.chunk_entropy else None
        )
        return plain_log_prob_entropy(
            logits,
            labels,
            temperature=temperature,
            need_entropy=need_entropy,
            need_best=need_best,
            need_sum_squares=need_sum_squares,
            entropy_memory=EntropyMemory(chunk_size, self.recompute_entropy),
        )


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether its weight and bias say all, so that the product may be computed elsewhere."""
    return type(layer) in (nn.Linear, Float32Head)


def _exact_head(
    layer: ExactLinear,
    hidden: Tensor,
    labels: Tensor,
    temperature: float,
    need_entropy: bool,
    need_best: bool,
    need_sum_squares: bool,
) -> LogProbs:
    """Rows in chunks, whose logits are computed a second time in backward."""

    def of_chunk(hidden: Tensor, labels: Tensor) -> LogProbs:
        logits = layer(hidden)
        plain = plain_log_prob_entropy(
            logits,
            labels,
            temperature=temperature,
            need_entropy=need_entropy,
            need_best=need_best,
            need_sum_squares=need_sum_squares,
        )
        return plain._replace(log_probs=log_probs_with_gradient(logits, labels, temperature))

    rows = chunk_rows(layer.out_features, hidden.device)
    parts = [
        checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(hidden.split(rows), labels.split(rows), strict=True)
    ]

    def joined(values: list[Tensor | None]) -> Tensor | None:
        wanted = [value for value in values if value is not None]
        return torch.cat(wanted) if wanted else None

    return LogProbs(
        torch.cat([part.log_probs for part in parts]),
        joined([part.entropy for part in parts]),
        joined([part.best for part in parts]),
        joined([part.sum_squares for part in parts]),
    )
