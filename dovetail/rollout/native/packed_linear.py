"""bfloat16 products on a CPU with weights in oneDNN's own layout. Changes no value, holds a second copy of the weights.

A plain product lays its weight out anew in every call, which costs a third of a decode step's products. float32 gains
nothing by it, and neither does the output layer: both stay as they are. The copies are made at the first product after
a change of weights, and are dropped while the engine sleeps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Rows that the layout is made for; products of other heights read it too.
_TYPICAL_ROWS = 64


class PackedLinear(nn.Linear):
    """In place of `plain`, over its own weight and bias. `forget` must be called when those change."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        self._packed: Tensor | None = None

    def forget(self) -> None:
        self._packed = None

    def forward(self, input: Tensor) -> Tensor:
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _TYPICAL_ROWS)
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")


def pack_linears(model: PreTrainedModel, device: torch.device) -> list[PackedLinear]:
    """Replace the linear layers of an engine's own module, where that pays; returns the new ones."""
    if device.type != "cpu" or model.dtype != torch.bfloat16 or not _is_supported():
        return []
    head = model.get_output_embeddings()
    packed = []
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child is not head:
                packed.append(PackedLinear(child))
                module._modules[name] = packed[-1]
    return packed


def _is_supported() -> bool:
    # Not part of PyTorch's public interface: the compiler's own route to oneDNN, which a build may lack.
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    return (
        torch.backends.mkldnn.is_available()
        and all(hasattr(torch.ops.mkldnn, name) for name in names)
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
