"""Packed attention for any transformers model, registered as `attn_implementation="dovetail_packed"`.

The model call takes `segments=PackedSegments(...)` and `attention_mask=no_mask()`; every layer hands both on. Sequences
inside the row do not see each other, but for a beginning they share (`segments.shared`). With `segments.sp_group` the
row is spread over ranks and tokens are swapped for heads around the kernel (Ulysses). Without `segments` it is plain
SDPA with the usual masks: one setting serves packed and padded calls, generation and vision towers.

Kernel, chosen per call: on CUDA in half precision flash-attn's varlen kernel when installed, else PyTorch's own
(`torch.nn.attention.varlen`); everywhere else one SDPA call per sequence, the fastest of the ways measured on CPU.
Refuses what these kernels do not compute: attention sinks, score caps, position biases, non-causal packed attention.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from dovetail.models.errors import PackingError
from dovetail.models.exact import attention, exactly
from dovetail.models.packing import PackedSegments
from dovetail.parallel.ulysses import gather_heads_scatter_seq, scatter_qkv_heads

PACKED_ATTENTION = "dovetail_packed"

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def register_packed_attention() -> str:
    """Make the name known to transformers (idempotent) and return it."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
    return PACKED_ATTENTION


def no_mask() -> Tensor:
    """The mask of a packed call, whose `segments` say it all; `packed_attention` does not read it.

    transformers hands a mask of four dimensions on as it is. Given none, it looks for sequences in the position ids,
    for which the host would wait for the device, and builds an `[N, N]` mask.
    """
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


class _Options(NamedTuple):
    """What a kernel is told beside the tensors; `window` is how many tokens one sees, itself included."""

    scale: float
    dropout: float
    window: int | None


# Its host-side segment lengths differ in every micro-batch: traced, each would compile the layer anew.
@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    segments: PackedSegments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls: `query` is `[B, heads, N, D]`, the result `[B, N, heads, D]`."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    packed = attention_mask is not None and attention_mask.numel() == 1 < key.size(2)  # `no_mask()`
    if packed and not causal:
        raise PackingError(
            f"{type(module).__name__} is not causal, which packed attention is; set use_remove_padding=False for this "
            "model."
        )
    if packed and segments is None:
        raise PackingError(
            f"{type(module).__name__} does not hand keywords of the model's call on to attention, so packed sequences "
            "would mix; set use_remove_padding=False for this model."
        )
    if segments is None or not causal:  # a vision tower beside a packed decoder gets the keyword too
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if attention_mask is not None and attention_mask.numel() > 1:
        raise PackingError(
            f"{type(module).__name__} has an attention mask of its own making, which packed attention does not read; "
            "set use_remove_padding=False for this model."
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise PackingError(
                f"{type(module).__name__} asks attention for {name}{_number(kwargs[name])}, which packed attention "
                "does not compute; set use_remove_padding=False for this model."
            )
    query, key, value = _same_dtype(query, key, value)
    if segments.sp_group is not None:
        query, key, value = scatter_qkv_heads(query, key, value, seq_dim=2, head_dim=1, group=segments.sp_group)
    scale = scaling if scaling is not None else query.size(-1) ** -0.5
    kernel, options = _kernel_for(query, dropout), _Options(scale, dropout, sliding_window)
    if getattr(module, "attends_exactly", False):
        kernel = partial(_exact, kernel)
    out = kernel(query, key, value, segments, options)
    if segments.sp_group is not None:
        out = gather_heads_scatter_seq(out, head_dim=2, seq_dim=1, group=segments.sp_group)
    return out, None


def _number(value: Any) -> str:
    """Not the numbers of a parameter."""
    return "" if isinstance(value, Tensor) else f"={value!r}"


def _same_dtype(*tensors: Tensor) -> Iterator[Tensor]:
    # Under autocast rotary embeddings leave query and key in float32 while value is already bfloat16.
    device = "cpu" if tensors[0].is_meta else tensors[0].device.type  # there is no autocast of the meta device
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensors[-1].dtype
    return (t.to(dtype) for t in tensors)


def _kernel_for(query: Tensor, dropout: float) -> Callable[..., Tensor]:
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return _sdpa_by_sequence
    if _flash_attn_is_here():
        return _flash_attn
    if dropout:
        raise NotImplementedError(
            f"PyTorch's varlen kernel has no dropout ({dropout}); set attention_dropout=0 or install flash-attn."
        )
    return _torch_varlen


def _exact(
    plain: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: PackedSegments,
    options: _Options,
) -> Tensor:
    if options.dropout:
        raise NotImplementedError(
            f"rollout.exact has no dropout ({options.dropout}) in attention; set it to False for this model."
        )
    return exactly(
        lambda q, k, v: attention(q, k, v, segments, options.scale, options.window),
        lambda q, k, v: plain(q, k, v, segments, options),
        query,
        key,
        value,
    )


@lru_cache(maxsize=1)
def _flash_attn_is_here() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def _sdpa_by_sequence(query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, options: _Options) -> Tensor:
    outs = []
    lengths = list(segments.lengths)
    spans = [(0, 0)] * len(lengths) if segments.shared is None else segments.shared.spans
    parts = zip(spans, query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    for (start, shared), q, k, v in parts:
        if shared:
            k = torch.cat([key.narrow(2, start, shared), k], 2)
            v = torch.cat([value.narrow(2, start, shared), v], 2)
        windowed = options.window is not None and options.window < k.size(2)
        mask = _causal_mask(q.size(2), k.size(2), options.window, query.device) if shared or windowed else None
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=options.dropout,
            scale=options.scale,
            enable_gqa=True,
        )
        outs.append(out)
    return torch.cat(outs, 2).transpose(1, 2).contiguous()


def _causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """The queries are the last of the keys. A token sees itself and the `window - 1` before it, as in transformers."""
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance = queries[:, None] - torch.arange(num_keys, device=device)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


class _TakeKeys(torch.autograd.Function):
    """`tokens[index]` for keys that several sequences see; their gradients are added up in float32, in order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_tokens = tokens.size(0)
        return tokens[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = grads[0].new_zeros(ctx.num_tokens, *grads[0].shape[1:], dtype=torch.float32)
        return total.index_put_((index,), grads[0].float(), accumulate=True).to(grads[0].dtype), None


class _Varlen(NamedTuple):
    """Arguments of a varlen kernel: `[N, heads, D]` each, where sequences begin, and the longest."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments) -> _Varlen:
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    cu, longest, shared = segments.cu_seqlens, segments.max_length, segments.shared
    if shared is None:
        return _Varlen(q, k, v, cu, cu, longest, longest)
    keys, values = (_TakeKeys.apply(t, shared.index) for t in (k, v))
    return _Varlen(q, keys, values, cu, shared.cu_seqlens, longest, max(shared.lengths))


def _torch_varlen(query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, options: _Options) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    arguments = _varlen(query, key, value, segments)
    out = varlen_attn(*arguments, scale=options.scale, **varlen_options(options.window))
    assert isinstance(out, Tensor), "only a request for the normaliser makes varlen_attn return a pair"
    return out.unsqueeze(0)


@lru_cache(maxsize=32)
def varlen_options(window: int | None) -> dict[str, Any]:
    """Arguments of `varlen_attn` for causal attention, which differ between releases of torch."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    # Torch 2.11 takes fewer KV heads as they are; later releases want to be told.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    return options


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, options: _Options) -> Tensor:
    size = (-1, -1) if options.window is None else (options.window - 1, 0)
    sums = {"dropout_p": options.dropout, "softmax_scale": options.scale, "causal": True, "window_size": size}
    out = importlib.import_module("flash_attn").flash_attn_varlen_func(*_varlen(query, key, value, segments), **sums)
    return out.unsqueeze(0)
