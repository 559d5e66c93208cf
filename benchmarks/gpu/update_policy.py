"""One policy update of the 1.5B shape on one GPU: time, share of the measured matrix rate, and peak memory.

512 sequences of 120 + 512 tokens (GRPO on 64 prompts x 8 answers), micro-batches of 20 k tokens, random weights, fp32
master weights with bf16 compute. Rows differ in head, packing, recomputation, compilation and whether a prompt is
computed once for its responses; the first is what the others are compared with. The share of the matrix rate counts
every prompt as often as it has responses. Run on a CUDA machine: ``python -m benchmarks.gpu.update_policy``. With
``--fp8`` the rows are compiled layers in bf16 and with each fp8 recipe, and the errors of log-probs and gradients come
with them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.gpu import fp8
from benchmarks.gpu.shapes import SHAPES, VOCABULARY, qwen2_config
from dovetail.backends.build import build_backend
from dovetail.config.actor import ActorConfig
from dovetail.config.fsdp import FSDPConfig
from dovetail.config.optim import OptimConfig
from dovetail.models.activations import enable_gradient_checkpointing
from dovetail.models.compile import compile_layers
from dovetail.models.fp8 import Recipe, use_fp8_projections
from dovetail.models.policy import PolicyModel
from dovetail.protocol import DataProto
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.micro_batches import MicroBatchLimit


@dataclass(frozen=True)
class Variant:
    name: str
    fused: bool = True
    packed: bool = True
    recompute: bool = False
    compile: bool = False
    shared: bool = False
    """A prompt is computed once for its eight responses, as in a run; otherwise every prompt is different."""
    lengths: str = "fixed"  # fixed | log-uniform
    micro_batch_rows: int | None = None
    fp8: Recipe | None = None


VARIANTS = (
    Variant("packed, fused head"),
    Variant("packed, fused head, compiled layers", compile=True),
    Variant("packed, fused head, compiled layers, prompts once", compile=True, shared=True),
    Variant("packed, plain head", fused=False),
    Variant("packed, fused head, recomputation", recompute=True),
    Variant("lengths 64..2048, packed", lengths="log-uniform"),
    Variant("lengths 64..2048, padded", lengths="log-uniform", packed=False, micro_batch_rows=8),
)
FP8_VARIANTS = (
    Variant("packed, fused head, compiled layers", compile=True),
    Variant("the same, fp8 rowwise", compile=True, fp8="rowwise"),
    Variant("the same, fp8 rowwise_with_gw_hp", compile=True, fp8="rowwise_with_gw_hp"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=20_480)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", type=int, help="indices of the variants to run")
    parser.add_argument("--fp8", action="store_true", help="bf16 against the fp8 recipes, with their errors")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one update, longest first")
    args = parser.parse_args()
    rate = matrix_rate()
    print(f"measured bf16 matrix rate: {rate / 1e12:.0f} TFLOP/s")
    variants = FP8_VARIANTS if args.fp8 else VARIANTS
    for variant in variants if args.only is None else [variants[i] for i in args.only]:
        row = measure(variant, args.shape, args.rows, args.max_tokens, args.repeats, rate, args.profile)
        print(json.dumps(row), flush=True)
    if args.fp8:
        one_micro_batch = make_batch(args.max_tokens // 632, "fixed")
        for row in (*fp8.errors(args.shape, one_micro_batch), *fp8.products(args.shape, args.max_tokens)):
            print(json.dumps(row), flush=True)


def measure(
    variant: Variant, shape: str, rows: int, max_tokens: int, repeats: int, rate: float, profiled: bool = False
) -> dict:
    torch._dynamo.reset()  # no variant may use up the recompilations of another
    config = qwen2_config(shape)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if variant.recompute:
        enable_gradient_checkpointing(model)
    if variant.fp8 is not None:
        use_fp8_projections(model, variant.fp8, torch.device("cuda"))
    if variant.compile:
        compile_layers(model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    network = PolicyModel(
        model, use_remove_padding=variant.packed, use_fused_kernels=variant.fused, share_prefixes=variant.shared
    )
    backend = build_backend(
        "single", network, fsdp=FSDPConfig(), optim=OptimConfig(lr=1e-6, total_training_steps=100), device="cuda"
    )
    actor = DataParallelPPOActor(
        ActorConfig(
            ppo_micro_batch_size_per_gpu=variant.micro_batch_rows,
            use_dynamic_bsz=variant.micro_batch_rows is None,
            ppo_max_token_len_per_gpu=max_tokens,
        ),
        backend,
        mini_batch_rows=rows,
        log_prob_limit=MicroBatchLimit(rows=8),
    )
    batch = make_batch(rows, variant.lengths, samples=8 if variant.shared else 1)
    tokens = int(batch.tensors["attention_mask"].sum())
    actor.update_policy(batch)  # warm-up: optimizer state, kernels
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        actor.update_policy(batch)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    if profiled:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            actor.update_policy(batch)
            torch.cuda.synchronize()
        print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=80))
    seconds = statistics.median(times)
    flops = 6 * num_parameters * tokens + attention_flops(config, batch)
    peak = torch.cuda.max_memory_allocated() / 2**30
    del actor, backend, network, model
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "variant": variant.name,
        "shape": shape,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "all_seconds": [round(t, 3) for t in times],
        "tokens_per_s": round(tokens / seconds),
        "mfu_of_measured_rate": round(flops / seconds / rate, 3),
        "peak_gib": round(peak, 1),
    }


def make_batch(rows: int, lengths: str, *, prompt: int = 120, response: int = 512, samples: int = 1) -> DataProto:
    """Random tokens, `samples` responses to each prompt; `log-uniform` draws lengths from 64 to 2048, most of them far
    below the longest."""
    generator = torch.Generator().manual_seed(0)
    if lengths == "fixed":
        width, sizes = prompt + response, torch.full((rows,), prompt + response)
    else:
        prompt, width = 32, 2048
        uniform = torch.rand(rows, generator=generator)
        sizes = (64 * (2048 / 64) ** uniform).long()
    response_width = width - prompt
    positions = torch.arange(width)
    attention_mask = (positions[None] < sizes[:, None]).long()
    response_mask = attention_mask[:, prompt:]
    input_ids = torch.randint(0, VOCABULARY, (rows, width), generator=generator)
    input_ids[:, :prompt] = input_ids[::samples, :prompt].repeat_interleave(samples, 0)[:rows]
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": positions.expand(rows, width).contiguous(),
            "responses": input_ids[:, prompt:].contiguous(),
            "response_mask": response_mask.contiguous(),
            "advantages": torch.randn(rows, response_width, generator=generator),
        },
        meta_info={"temperature": 1.0},
    )


def attention_flops(config: Qwen2Config, batch: DataProto) -> float:
    """Forward and backward of causal attention: 6 x 2 x heads x head size x length^2 / 2 per layer and sequence."""
    lengths = batch.tensors["attention_mask"].sum(dim=1).double()
    return float(6 * config.num_hidden_layers * config.hidden_size * lengths.square().sum())


def matrix_rate(size: int = 8192, repeats: int = 10) -> float:
    """FLOP/s of a large bf16 matrix product on random data."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        a @ b
    torch.cuda.synchronize()
    return 2 * size**3 * repeats / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
