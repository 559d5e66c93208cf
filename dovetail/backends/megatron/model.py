"""A role's network on Megatron: `GPTModel` chunks whose last one ends in what the role asks for. No loss, no optimizer.

A policy ends in log-probs at the positions asked for, so the other tokens cost no head; value and reward models end in
one number a token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from dovetail.backends.megatron import settings
from dovetail.backends.megatron.dense_layer import DenseLayer, layers_compile, rotary_table
from dovetail.backends.megatron.families.base import MegatronFamily
from dovetail.backends.megatron.layout import MegatronLayout
from dovetail.backends.megatron.parts import MegatronModel, padded_vocab_size
from dovetail.backends.megatron.spec import decoder_block_spec
from dovetail.backends.megatron.torch_layers import Replicated
from dovetail.backends.megatron.vocab_distributions import divergence_from, listed_log_probs, top_tokens
from dovetail.backends.megatron.vocab_parallel import VocabShard, vocab_parallel_log_prob
from dovetail.config.megatron import MegatronConfig
from dovetail.models.head import LogProbs, default_chunk_size, fused_linear_log_prob
from dovetail.models.load import Role
from dovetail.models.vocabulary_divergence import Teacher

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadCall:
    """What a policy's head is asked for: log-probs of `labels` at the tokens `rows` of this rank."""

    rows: Tensor
    labels: Tensor
    temperature: float
    need_entropy: bool
    need_sum_squares: bool = False
    need_best: bool = False
    top_k: int = 0
    top_vocab_size: int | None = None
    listed_ids: Tensor | None = None
    """`[n, k]`: tokens whose log-probs are wanted beside those of the labels."""
    need_hidden: bool = False
    teacher: Teacher | None = None

    def widths(self, hidden_size: int, vocab_size: int) -> dict[str, int]:
        """What the rows of the head's output are, in order, and how many."""
        top = min(self.top_k, vocab_size, self.top_vocab_size or vocab_size)
        more = {
            "top_ids": top,
            "top_log_probs": top,
            "listed": 0 if self.listed_ids is None else self.listed_ids.size(-1),
            "overlap": int(self.listed_ids is not None),
            "hidden": hidden_size if self.need_hidden else 0,
            "divergence": int(self.teacher is not None),
        }
        first = dict.fromkeys(("log_probs", "entropy", "best", "sum_squares"), 1)
        return first | {name: width for name, width in more.items() if width}


class RoleModel(GPTModel):
    """`forward(..., labels=HeadCall)` gives `[4 + m, n]` float32 of a policy: log-probs, entropies, best log-probs,
    sums of squares, and what else the call asks for (`HeadCall.widths`); without labels `[t]` of a value or reward
    model. Stages before the last give hidden states."""

    def __init__(
        self,
        *args: Any,
        role: Role,
        num_real_tokens: int,
        chunked_head: bool,
        has_dense_layers: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.role = role
        self._has_dense_layers = has_dense_layers
        self._num_real_tokens = num_real_tokens
        self._chunked_head = chunked_head
        if self.post_process and role != "policy":
            self.output_layer = ScalarHead(self.config, bias=role == "value")

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, **options: Any) -> tuple[Any, ...]:
        embedded, frequencies, *others = super()._preprocess(input_ids, position_ids, **options)
        if self._has_dense_layers:
            frequencies = rotary_table(frequencies, position_ids, self.config)
            # The first layer is given what the others are: no view, or the compiler makes a program for it alone.
            embedded = embedded.clone(memory_format=torch.contiguous_format)
        return embedded, frequencies, *others

    def _postprocess(self, hidden_states: Tensor, labels: HeadCall | None = None, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.role != "policy":
            return self.output_layer(self._whole(hidden_states, adds_gradients=False))
        assert labels is not None, "a policy is told which log-probs are wanted"
        return self._log_probs(self._whole(hidden_states, adds_gradients=True), labels)

    def _whole(self, hidden_states: Tensor, *, adds_gradients: bool) -> Tensor:
        """`[t, H]` of all tokens. `adds_gradients`: ranks go on with different parts of the head, so the gradient is
        the sum of theirs; otherwise all compute the same."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=adds_gradients, group=group
            )
        elif adds_gradients:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        return hidden_states.squeeze(1)

    def _log_probs(self, hidden: Tensor, call: HeadCall) -> Tensor:
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        group = self.pg_collection.tp
        size = weight.size(0)
        shard = VocabShard(group, group.rank() * size, (group.rank() + 1) * size, self._num_real_tokens)
        states = hidden[call.rows]
        asked = {
            "temperature": call.temperature,
            "need_entropy": call.need_entropy,
            "need_sum_squares": call.need_sum_squares,
        }
        if self._chunked_head and group.size() == 1 and not call.need_best:
            # On CUDA one kernel in the place of a dozen passes over the logits; the vocabulary has no padding here.
            results = _four_rows(fused_linear_log_prob(states, weight, call.labels, **asked))
        else:
            chunk_size = default_chunk_size(weight) if self._chunked_head else None
            results = vocab_parallel_log_prob(states, weight, call.labels, shard, chunk_size=chunk_size, **asked)
        more: list[Tensor] = []
        if call.top_k:
            more += top_tokens(states, weight, shard, call.top_k, call.top_vocab_size, temperature=call.temperature)
        if call.listed_ids is not None:
            more += listed_log_probs(states, weight, shard, call.listed_ids, temperature=call.temperature)
        if call.need_hidden:
            more.append(states)
        if call.teacher is not None:
            more.append(divergence_from(states, weight, shard, call.teacher, temperature=call.temperature))
        return torch.cat([results, *(columns.float().t() for columns in more)]) if more else results


def _four_rows(found: LogProbs) -> Tensor:
    """What `vocab_parallel_log_prob` gives, from the head that has the whole vocabulary."""
    nothing = torch.zeros_like(found.log_probs)
    rows = (found.log_probs, found.entropy, found.best, found.sum_squares)
    return torch.stack([nothing if row is None else row for row in rows])


class ScalarHead(Replicated):
    """One number a token, alike on all tensor-parallel ranks."""

    def __init__(self, config: Any, *, bias: bool) -> None:
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias).squeeze(-1).float()


def build_model(
    family: MegatronFamily,
    hf_config: Any,
    role: Role,
    config: MegatronConfig,
    layout: MegatronLayout,
    *,
    recompute: bool,
    chunked_head: bool,
    compile_layers: bool,
    device: torch.device,
) -> MegatronModel:
    """The chunks of this rank, their weights undefined, frozen."""
    _seed_random_states()
    mcore = settings.transformer_config(family, hf_config, config, layout, recompute=recompute, device=device)
    compiled = compile_layers and layers_compile(config, mcore)
    if compile_layers and not compiled:
        logger.info("layers are not compiled: docs/megatron.md says which are")
    chunks = [
        _build_chunk(
            family, hf_config, role, mcore, config, layout, stage,
            chunked_head=chunked_head, compiled=compiled, device=device,
        )
        for stage in range(layout.vpp_size)
    ]  # fmt: skip
    wrapped = [Float16Module(mcore, chunk) if mcore.bf16 else chunk for chunk in chunks]
    for chunk in chunks:
        chunk.requires_grad_(False)
        _mark_split_weights(chunk)
        _keep_router_bias(chunk)
    return MegatronModel(chunks, wrapped, mcore, hf_config, role, layout)


def wrap_for_training(model: MegatronModel, config: MegatronConfig) -> MegatronModel:
    """The same model with gradients, which are reduced over data-parallel ranks. Its weights must be loaded."""
    reduction = settings.ddp_config(config)
    for chunk in model.chunks:
        chunk.requires_grad_(True)
    wrapped = [
        # Chunks after the first are not split into buckets: their reduction is not on the critical path.
        DistributedDataParallel(model.config, reduction, module, disable_bucketing=stage > 0)
        for stage, module in enumerate(model.wrapped)
    ]
    return replace(model, wrapped=wrapped)


def _build_chunk(
    family: MegatronFamily,
    hf_config: Any,
    role: Role,
    mcore: Any,
    config: MegatronConfig,
    layout: MegatronLayout,
    stage: int,
    *,
    chunked_head: bool,
    compiled: bool,
    device: torch.device,
) -> RoleModel:
    vp_stage = stage if layout.vpp_size > 1 else None
    arguments = {**family.gpt_model(hf_config), **config.override_mcore_model_config}
    vocab_size = arguments.pop("vocab_size")
    if role != "policy":
        arguments["share_embeddings_and_output_weights"] = False
    chunk = RoleModel(
        mcore,
        decoder_block_spec(mcore, vp_stage, dense_layer=DenseLayer if compiled else TransformerLayer),
        padded_vocab_size(vocab_size, layout.tp_size),
        arguments.pop("max_sequence_length"),
        pre_process=layout.is_first_stage and stage == 0,
        post_process=layout.is_last_stage and stage == layout.vpp_size - 1,
        vp_stage=vp_stage,
        role=role,
        num_real_tokens=vocab_size,
        chunked_head=chunked_head,
        has_dense_layers=compiled,
        **arguments,
    ).to(device)
    family.finish(chunk, hf_config)
    for layer in chunk.decoder.layers if compiled else ():
        layer.compile_regions()
    if chunk.pre_process and hf_config.pad_token_id is not None:
        _leave_padding_row(chunk.embedding.word_embeddings, hf_config.pad_token_id)
    return chunk


def _leave_padding_row(embedding: VocabParallelEmbedding, padding_id: int) -> None:
    """Looking a padding token up gives its row no gradient, as transformers has it (`padding_idx`). Packed rows have no
    padding, but the same token may be meant: chat templates often end a turn with it."""

    def without_gradient(module: VocabParallelEmbedding, arguments: tuple[Tensor], output: Tensor) -> Tensor:
        is_padding = arguments[0] == padding_id
        if module.reduce_scatter_embeddings:
            is_padding = is_padding.t().chunk(module.tp_group.size())[module.tp_group.rank()]
        return torch.where(is_padding.unsqueeze(-1), output.detach(), output)

    embedding.register_forward_hook(without_gradient)


def _seed_random_states() -> None:
    """Megatron asks for its trackers even where no dropout is: they must exist. Their seeds do not matter here."""
    if get_cuda_rng_tracker().get_states():
        return
    state = torch.get_rng_state()
    model_parallel_cuda_manual_seed(0)
    torch.set_rng_state(state)  # without CUDA that seeded the generator of everything else


def _mark_split_weights(chunk: nn.Module) -> None:
    """Megatron marks them while it draws random weights (layers.py, `_initialize_affine_weight_*`), which is left out.
    Unmarked, a part would count as a copy, and the gradient norm would miss those of all ranks but the first."""
    for module in chunk.modules():
        if not isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
            continue
        if module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)


def _keep_router_bias(chunk: nn.Module) -> None:
    # It chooses experts by comparing sums that differ in the fourth digit, so it stays in float32 in a bfloat16 model.
    for module in chunk.modules():
        if getattr(module, "expert_bias", None) is not None:
            module.expert_bias = module.expert_bias.float()
