"""A tiny policy, a batch and a plain token loss for backend tests. No RL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dovetail.backends.base import LossFn, RankInfo, TokenOutput, TrainBackend
from dovetail.config.fsdp import FSDPConfig, MixedPrecisionConfig
from dovetail.config.optim import OptimConfig
from dovetail.models.lora import add_lora
from dovetail.models.policy import PolicyModel
from dovetail.protocol import DataProto

VOCAB = 61
FP32 = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="float32"))
# Adam divides by sqrt(v) + eps: where a gradient is pure rounding noise (1e-9), the default eps of 1e-8 would turn
# noise into a full-size step and no two summation orders would agree. 1e-4 keeps such entries near zero.
OPTIM = OptimConfig(lr=1e-2, eps=1e-4, weight_decay=0.1)


def tiny_policy(
    *,
    tied: bool = True,
    checkpointing: bool = False,
    remove_padding: bool = False,
    fused: bool = False,
    lora: bool = False,
) -> PolicyModel:
    """A Llama of two layers with equal weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, tie_word_embeddings=tied, initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if lora:
        add_lora(model, rank=4, alpha=8.0)
    return PolicyModel(model, use_remove_padding=remove_padding, use_fused_kernels=fused)


def tiny_batch(rows: int = 8, length: int = 12, seed: int = 1) -> DataProto:
    """Right-padded rows of different lengths with a weight per token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, length + 1, (rows,), generator=generator)
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    return DataProto.from_dict(
        {
            "input_ids": torch.randint(0, VOCAB, (rows, length), generator=generator) * mask,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "weights": torch.rand(rows, length, generator=generator) * mask,
        }
    )


def weighted_nll(total: float) -> LossFn:
    """A share of the weighted mean of -log p; ``total`` is the sum of weights over the whole mini-batch."""

    def loss_fn(output: TokenOutput, micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        assert output.log_probs is not None
        loss = -(output.log_probs * micro_batch.tensors["weights"]).sum() / total
        return loss, {"loss": loss.detach()}

    return loss_fn


def total_weight(batch: DataProto) -> float:
    return float(batch.tensors["weights"][:, 1:].sum())


def cut(batch: DataProto, sizes: Sequence[int]) -> list[DataProto]:
    """Consecutive micro-batches of the given sizes."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(batch[start : start + size])
        start += size
    assert start == len(batch), f"{sizes} do not add up to {len(batch)} rows"
    return pieces


def train_steps(backend: TrainBackend, count: int) -> None:
    """On the same rows every time, in two micro-batches of different sizes."""
    batch = tiny_batch()
    rows = my_rows(batch, backend.rank_info)
    for _ in range(count):
        backend.forward_backward(cut(rows, (1, len(rows) - 1)), weighted_nll(total_weight(batch)))
        backend.optim_step()


def my_rows(batch: DataProto, rank_info: RankInfo) -> DataProto:
    """The rows of this data-parallel rank: an equal, consecutive part."""
    size = len(batch) // rank_info.dp_size
    return batch[rank_info.dp_rank * size : (rank_info.dp_rank + 1) * size]


def as_numpy(named: Iterable[tuple[str, Tensor]]) -> dict[str, np.ndarray]:
    """Copies that travel between processes."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in named}


def largest_difference(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> float:
    assert set(left) == set(right), set(left) ^ set(right)
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)
