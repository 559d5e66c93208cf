"""Products of the decoder layers' projections in fp8 (e4m3), for training. Parameters and activations keep their dtype.

Every operand is quantised where it is used. Activations have one scale per token and weights one per output, from the
amax over the contracted dimension; their transposes in backward have one scale for all, the largest of those, which
takes no further pass over the numbers. Scales are powers of two, so that scaling itself rounds nothing. The head,
embeddings, norms, routers and experts stay as they are. On CUDA the products are `torch._scaled_mm`; elsewhere they
are emulated on the same bytes.

Weights are quantised in each forward and backward, not kept: at 20 k tokens a micro-batch that is about 1 % of an
update, and it is the same with weights that FSDP gathers and frees again.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Recipe = Literal["rowwise", "rowwise_with_gw_hp"]
"""`rowwise`: all three products; `rowwise_with_gw_hp`: the weight's gradient stays in the compute dtype."""

_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
_DTYPE = torch.float8_e4m3fn
_SMALLEST_AMAX = 1e-30  # below it a row counts as zeros
_MULTIPLE = 16  # what `_scaled_mm` wants of every dimension but the first


def use_fp8_projections(hf_model: Any, recipe: Recipe, device: torch.device) -> int:
    """Replace the projections of every decoder layer in place; returns how many. Call it before FSDP wraps them."""
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        raise ValueError(
            f"actor.fp8_recipe={recipe} needs a GPU with fp8 matrix units (compute capability 8.9 or newer), and "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}; set it to null."
        )
    names = set(hf_model._no_split_modules or ())
    base = hf_model.base_model
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base  # not the layers of a vision tower
    layers = [module for module in decoder.modules() if type(module).__name__ in names]
    replaced = 0
    for owner in (part for layer in layers for part in layer.modules()):
        for name, child in owner.named_children():
            if name in _PROJECTIONS and type(child) is nn.Linear:
                setattr(owner, name, Fp8Linear(child, recipe))
                replaced += 1
    if not replaced:
        raise ValueError(
            f"{type(hf_model).__name__} has no linear layers called {', '.join(sorted(_PROJECTIONS))}, which "
            f"actor.fp8_recipe={recipe} is about; set it to null."
        )
    return replaced


class Fp8Linear(nn.Linear):
    """In place of `plain`, over its own weight and bias."""

    def __init__(self, plain: nn.Linear, recipe: Recipe) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
        if plain.in_features % _MULTIPLE or plain.out_features % _MULTIPLE:
            raise ValueError(
                f"a projection of {plain.in_features} to {plain.out_features} features cannot be multiplied in fp8, "
                f"which wants multiples of {_MULTIPLE}; set actor.fp8_recipe to null."
            )
        self.weight, self.bias = plain.weight, plain.bias
        self._fp8_grad_weight = recipe == "rowwise"

    def forward(self, input: Tensor) -> Tensor:
        x = input.reshape(-1, self.in_features)
        rows, outputs = quantize_rows(x.detach()), quantize_rows(self.weight.detach())
        out = linear(x, self.weight, *rows, *outputs, self._fp8_grad_weight)
        out = out.view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


class Quantized(NamedTuple):
    """`data * scale` is the matrix, `[rows, contracted]`. The scale is float32: `[rows, 1]`, or `[1, 1]` for all."""

    data: Tensor
    scale: Tensor


def quantize_rows(x: Tensor) -> Quantized:
    """Plain operations, which a compiled layer fuses into whatever made `x`."""
    amax = x.abs().amax(dim=1, keepdim=True).float().clamp(min=_SMALLEST_AMAX)
    # The smallest power of two that keeps the row within e4m3's 448 = 1.75 * 2**8. On the bits of the amax: a mantissa
    # above 1.75 carries into the exponent, then the mantissa is cut off.
    scale = ((amax.view(torch.int32) + 0x1FFFFF) & 0x7F800000).view(torch.float32) * 2**-8
    return Quantized((x.float() * scale.reciprocal()).to(_DTYPE), scale)


def quantize_transposed(x: Tensor, row_scales: Tensor, after: Tensor) -> Quantized:
    """`x^T` with one scale, the largest of those that `quantize_rows` gave `x`; rows filled up to a multiple of 16."""
    scale = row_scales.amax(dim=0, keepdim=True)
    return Quantized(cast_transposed(x, scale, after), scale)


def multiply(a: Quantized, b: Quantized, dtype: torch.dtype, *, fast_accum: bool = True) -> Tensor:
    """`a b^T`. `fast_accum` keeps partial sums in the tensor core's own, shorter accumulators."""
    return scaled_product(a.data, b.data, a.scale, b.scale, dtype, fast_accum)


# Operations of our own, which a compiler takes as they are: its lowering of `_scaled_mm` may add guards on the number
# of tokens and compile the layer anew for each, and it fails to trace an autograd.Function with dynamic shapes.
@torch.library.custom_op("dovetail::scaled_product", mutates_args=())
def scaled_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """`(a * a_scale) (b * b_scale)^T`; the scales are both by row, or both one number."""
    if a.is_cuda:
        out = torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=fast_accum)
        return out.to(dtype)
    return ((a.float() @ b.float().t()) * a_scale * b_scale.t()).to(dtype)


@scaled_product.register_fake
def _(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast_accum: bool) -> Tensor:
    return a.new_empty((a.size(0), b.size(0)), dtype=dtype)


@torch.library.custom_op("dovetail::cast_transposed", mutates_args=())
def cast_transposed(x: Tensor, scale: Tensor, after: Tensor) -> Tensor:
    """`(x / scale)^T` in e4m3, its rows filled up with zeros to a multiple of 16.

    `after` is not read. It ties the operation to the backward pass: a compiler would else cast in the forward and keep
    the bytes, of weights that FSDP has gathered too.
    """
    if x.is_cuda and importlib.util.find_spec("triton") is not None:
        from dovetail.models.kernels.fp8 import cast_transposed_triton

        return cast_transposed_triton(x, scale, _padded(x.size(0)))
    padded = F.pad(x, (0, 0, 0, _padded(x.size(0)) - x.size(0)))
    return (padded.float() * scale.reciprocal()).to(_DTYPE).t().contiguous()


@cast_transposed.register_fake
def _(x: Tensor, scale: Tensor, after: Tensor) -> Tensor:
    return x.new_empty((x.size(1), _padded(x.size(0))), dtype=_DTYPE)


@torch.library.custom_op("dovetail::fp8_linear", mutates_args=())
def linear(
    x: Tensor, weight: Tensor, x8: Tensor, x_scale: Tensor, weight8: Tensor, weight_scale: Tensor, fp8_grad_weight: bool
) -> Tensor:
    """`x weight^T` by their quantised rows, with the gradients of `x` and `weight`."""
    return scaled_product(x8, weight8, x_scale, weight_scale, x.dtype, True)


@linear.register_fake
def _(
    x: Tensor, weight: Tensor, x8: Tensor, x_scale: Tensor, weight8: Tensor, weight_scale: Tensor, fp8_grad_weight: bool
) -> Tensor:
    return x.new_empty((x.size(0), weight.size(0)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, x_scale, _, weight_scale, ctx.fp8_grad_weight = inputs
    ctx.save_for_backward(x, weight, x_scale, weight_scale)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, x_scale, weight_scale = ctx.saved_tensors
    grad = grad.contiguous()
    rows = quantize_rows(grad)
    columns = quantize_transposed(weight, weight_scale, grad)
    # Both scales by row: there is no product for one of each kind.
    columns = columns._replace(scale=columns.scale.expand(weight.size(1), 1).contiguous())
    grad_x = multiply(rows, columns, x.dtype)
    if ctx.fp8_grad_weight:
        over_tokens = quantize_transposed(grad, rows.scale, grad), quantize_transposed(x, x_scale, grad)
        # A sum over all tokens: the short accumulators would lose digits.
        grad_weight = multiply(*over_tokens, weight.dtype, fast_accum=False)
    else:
        grad_weight = grad.t() @ x
    return grad_x, grad_weight, None, None, None, None, None


linear.register_autograd(_gradients, setup_context=_save)


def _padded(rows: int) -> int:
    return (rows + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE
