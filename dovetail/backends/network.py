"""How a backend talks to a network: columns of a micro-batch in, results per token out; names for other programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from dovetail.backends.base import ForwardOptions, TokenOutput
from dovetail.protocol import DataProto


def run_network(module: nn.Module, micro_batch: DataProto, options: ForwardOptions) -> TokenOutput:
    tensors = micro_batch.tensors
    found = module(
        tensors["input_ids"],
        tensors["attention_mask"],
        tensors["position_ids"],
        temperature=options.temperature,
        entropy=options.entropy,
    )
    return TokenOutput(**found)


def hf_named_tensors(
    module: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, merge_adapters: bool
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name.removeprefix("model."), tensor
