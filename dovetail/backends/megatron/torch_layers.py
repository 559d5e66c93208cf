"""Norms and linear layers in plain torch under the parameter names of Transformer Engine's modules.

So a model built without it has the names (`linear_qkv.layer_norm_weight`, `experts.linear_fc1.weight0`) and checkpoints
of one built with it. Only what decoder models need: RMSNorm, no fp8.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


class TorchRMSNorm(nn.Module):
    """RMSNorm in the order of operations of transformers: normalised in float32, rounded, then scaled."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        _check_rms(config)
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class TorchLayerNormColumnParallelLinear(ColumnParallelLinear):
    """Norm and column-parallel product in one module: `TELayerNormColumnParallelLinear`."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        _check_rms(config)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        return super().forward(rms_norm(x, self.layer_norm_weight, self.eps), *args, **options)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=_dp_cp_group(metadata),
        )


class Replicated(nn.Module):
    """Every tensor-parallel rank holds all of it, and a checkpoint holds it once."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=_dp_cp_group(metadata),
        )


class TorchLinear(Replicated):
    """A product that every tensor-parallel rank computes alike: `TELinear(parallel_mode="duplicated")`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None = "duplicated",
        config: Any,
        bias: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        assert parallel_mode == "duplicated", "MLA's down projections are replicated"
        assert not bias, "MLA's down projections have no bias"
        self.weight = nn.Parameter(_empty(config, output_size, input_size))
        self.weight.sequence_parallel = config.sequence_parallel  # pyrefly: ignore[missing-attribute]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class _GroupedLinear(nn.Module):
    """One matrix for each local expert, `weight{i}`; rows come sorted by expert: `TE*ParallelGroupedLinear`."""

    split_dim: ClassVar[int]

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert not bias, "experts with biases are not built"
        group = (
            pg_collection.expt_tp if pg_collection is not None else parallel_state.get_expert_tensor_parallel_group()
        )
        self.tp_group = group
        self.num_gemms = num_gemms
        sizes = [output_size, input_size]
        sizes[self.split_dim] //= group.size()
        for index in range(num_gemms):
            weight = nn.Parameter(_empty(config, *sizes))
            weight.allreduce = False  # pyrefly: ignore[missing-attribute]  reduced over ranks with the same experts
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=self.split_dim, stride=1)
            self.register_parameter(f"weight{index}", weight)

    def forward(self, x: Tensor, m_splits: Any) -> tuple[Tensor, None]:
        counts = m_splits.tolist() if isinstance(m_splits, Tensor) else [int(count) for count in m_splits]
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(counts), weights, strict=True)]), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:
        """Experts stacked on a leading axis, as `TEGroupedLinear` and `SequentialMLP` write them."""
        rank, size = (
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        tensors = {}
        for index in range(self.num_gemms):
            expert_offset = (len(sharded_offsets), rank * self.num_gemms + index, size * self.num_gemms)
            one = make_sharded_tensors_for_checkpoint(
                {"weight": getattr(self, f"weight{index}")},
                "",
                {"weight": self.split_dim},
                (*sharded_offsets, expert_offset),
                tp_group=self.tp_group,
                dp_cp_group=_dp_cp_group(metadata),
            )
            replace_prefix_for_sharding(one, "", prefix)
            tensor = one["weight"]
            tensor.replica_id = (*tensor.replica_id[:2], parallel_state.get_expert_data_parallel_rank())
            tensors[f"{prefix}weight{index}"] = tensor
        return tensors


class TorchColumnParallelGroupedLinear(_GroupedLinear):
    split_dim = 0


class TorchRowParallelGroupedLinear(_GroupedLinear):
    """The sum over expert-tensor ranks is the token dispatcher's."""

    split_dim = 1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.is_cuda:  # one kernel; in half precision it rounds once, after the scale, where transformers rounds before too
        return F.rms_norm(x, (x.size(-1),), weight, eps)
    return rms_norm_of_ops(x, weight, eps)


def rms_norm_of_ops(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In the operations of transformers, which a compiler fuses with what is around them."""
    hidden = x.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return weight * hidden.to(x.dtype)


def _norm_weight(config: Any, size: int) -> nn.Parameter:
    weight = nn.Parameter(torch.ones_like(_empty(config, size)))
    # Each tensor-parallel rank sees a part of the tokens: `finalize_model_grads` then adds the gradients up.
    weight.sequence_parallel = config.sequence_parallel  # pyrefly: ignore[missing-attribute]
    return weight


def _empty(config: Any, *sizes: int) -> Tensor:
    device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
    return torch.empty(*sizes, dtype=config.params_dtype, device=device)


def _check_rms(config: Any) -> None:
    if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
        raise ValueError(
            f"normalization={config.normalization} (zero-centred: {config.layernorm_zero_centered_gamma}) is not built "
            "without Transformer Engine; only RMSNorm is."
        )


def _dp_cp_group(metadata: Any) -> Any:
    return metadata["dp_cp_group"] if metadata else None
