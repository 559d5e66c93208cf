"""What fp8 products give and cost on one GPU: products and quantisation alone, errors of log-probs and gradients.

Called by ``python -m benchmarks.gpu.update_policy --fp8``, which measures whole updates too.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.gpu.shapes import SHAPES, qwen2_config
from dovetail.backends.base import TokenOutput
from dovetail.backends.build import build_backend
from dovetail.config.fsdp import FSDPConfig, MixedPrecisionConfig
from dovetail.config.optim import OptimConfig
from dovetail.models.compile import compile_layers
from dovetail.models.fp8 import Recipe, multiply, quantize_rows, quantize_transposed, use_fp8_projections
from dovetail.models.policy import PolicyModel
from dovetail.protocol import DataProto


def products(shape: str, tokens: int) -> Iterator[dict]:
    """Milliseconds of each product of a layer, and of what it takes to quantise its operands."""
    hidden, intermediate, _, heads, kv_heads = SHAPES[shape]
    head = hidden // heads
    quantize = torch.compile(quantize_rows, dynamic=True)
    for name, k, n in (
        ("q", hidden, hidden),
        ("kv", hidden, kv_heads * head),
        ("gate or up", hidden, intermediate),
        ("down", intermediate, hidden),
    ):
        x, w, g = (torch.randn(*size, device="cuda").bfloat16() for size in ((tokens, k), (n, k), (tokens, n)))
        rows = {key: quantize(value) for key, value in (("x", x), ("w", w), ("g", g))}
        columns = {key: quantize_transposed(value, rows[key].scale, g) for key, value in (("x", x), ("w", w), ("g", g))}
        by_row = columns["w"]._replace(scale=columns["w"].scale.expand(k, 1).contiguous())
        for product, a, b, plain in (
            ("forward", rows["x"], rows["w"], lambda x=x, w=w: x @ w.t()),
            ("grad_x", rows["g"], by_row, lambda g=g, w=w: g @ w),
            ("grad_w", columns["g"], columns["x"], lambda g=g, x=x: g.t() @ x),
        ):
            yield {
                "projection": name,
                "product": product,
                "bf16_ms": milliseconds(plain),
                "fp8_ms": milliseconds(lambda a=a, b=b: multiply(a, b, torch.bfloat16, fast_accum=False)),
                "fp8_fast_accum_ms": milliseconds(lambda a=a, b=b: multiply(a, b, torch.bfloat16)),
                "error": round(relative_error(multiply(a, b, torch.bfloat16, fast_accum=False), plain()), 4),
                "error_fast_accum": round(relative_error(multiply(a, b, torch.bfloat16), plain()), 4),
            }
        yield {
            "projection": name,
            **{f"rows_{key}_ms": milliseconds(lambda v=v: quantize(v)) for key, v in (("x", x), ("w", w), ("g", g))},
            **{
                f"transposed_{key}_ms": milliseconds(lambda v=v, s=rows[key].scale: quantize_transposed(v, s, v))
                for key, v in (("x", x), ("w", w), ("g", g))
            },
        }


def errors(shape: str, batch: DataProto) -> Iterator[dict]:
    """Of one forward and backward in bf16 and in fp8 against float32, on the same weights: log-probs and gradients."""
    exact_log_probs, exact_gradients = one_pass(shape, batch, "float32", None)
    for dtype, recipe in (("bfloat16", None), ("bfloat16", "rowwise"), ("bfloat16", "rowwise_with_gw_hp")):
        log_probs, gradients = one_pass(shape, batch, dtype, recipe)
        difference = (log_probs - exact_log_probs).abs()
        squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name, gradient in gradients.items():
            kind = name.removesuffix(".weight").rpartition(".")[2] if name.endswith("_proj.weight") else "other"
            exact = exact_gradients[name]
            for group in (kind, "all"):
                squares[group][0] += float((gradient - exact).double().square().sum())
                squares[group][1] += float(exact.double().square().sum())
        yield {
            "errors_of": recipe or dtype,
            "log_prob_mean_abs": round(float(difference.mean()), 5),
            "log_prob_p99": round(float(difference.quantile(0.99)), 5),
            "gradient_relative": {kind: round((a / b) ** 0.5, 5) for kind, (a, b) in sorted(squares.items())},
        }


def one_pass(shape: str, batch: DataProto, dtype: str, recipe: Recipe | None) -> tuple[Tensor, dict[str, Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(qwen2_config(shape), dtype=torch.float32, attn_implementation="sdpa")
    if recipe is not None:
        use_fp8_projections(model, recipe, torch.device("cuda"))
    if dtype != "float32":
        compile_layers(model)
    backend = build_backend(
        "single",
        PolicyModel(model, use_remove_padding=True, use_fused_kernels=True),
        fsdp=FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype=dtype)),
        optim=OptimConfig(lr=1e-6, total_training_steps=100),
        device="cuda",
    )
    seen: list[Tensor] = []

    def loss_fn(output: TokenOutput, micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        assert output.log_probs is not None
        width = micro_batch.tensors["responses"].size(1)
        mask = micro_batch.tensors["response_mask"]
        log_probs = output.log_probs[:, -width:]
        seen.append(log_probs.detach()[mask.bool()])
        return -(log_probs * micro_batch.tensors["advantages"] * mask).sum() / mask.sum(), {}

    backend.forward_backward([batch], loss_fn)
    gradients = {name: gradient.clone() for name, gradient in backend.named_gradients()}
    del backend, model
    gc.collect()
    torch.cuda.empty_cache()
    return seen[0], gradients


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) / repeats, 4)
