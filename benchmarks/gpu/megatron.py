"""One policy update on one GPU: the Megatron backend beside the plain one, in the same process, from the same weights.

512 sequences of 120 + 512 tokens (or of 64 to 2048), micro-batches of 20 k tokens, bf16 compute with fp32 masters, no
Transformer Engine. First the log-probs of both are compared, so that the times are of the same work. Each row says
time, tokens a second, peak memory and how many graphs were compiled in the warm-up and after it (none, if all is well);
a variant that fails says why, and the others go on. The first five are layers compiled and not, on both backends, and
prompts computed once, which only the plain backend does.

    python -m benchmarks.gpu.megatron                     # all variants, 0.5B and 1.5B
    python -m benchmarks.gpu.megatron --shapes 1.5B 0.5B --rows 256 --repeats 2 --only 0 1 2 3 4

Needs megatron-core 0.16.1. Where it cannot be installed its `megatron/` folder on PYTHONPATH is enough: it is plain
Python here (`datasets/helpers_cpp*.so` is never imported), and what it imports is torch, numpy and packaging. psutil is
needed by checkpoints only, einops and Transformer Engine not at all.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.shapes import SHAPES, qwen2_config
from benchmarks.gpu.update_policy import attention_flops, make_batch, matrix_rate
from dovetail.backends.base import ForwardOptions, TrainBackend
from dovetail.config.actor import ActorConfig, Strategy
from dovetail.config.fsdp import FSDPConfig
from dovetail.config.megatron import MegatronConfig
from dovetail.config.model import ModelConfig
from dovetail.config.optim import OptimConfig
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.build import build_policy
from dovetail.workers.micro_batches import MicroBatchLimit


@dataclass(frozen=True)
class Variant:
    strategy: Strategy
    compile: bool = False
    shared: bool = False
    """Eight responses to each prompt, which is computed once for them; otherwise every prompt is different."""
    fused: bool = True
    recompute: bool = False
    lengths: str = "fixed"  # fixed | log-uniform

    @property
    def name(self) -> str:
        head = "chunked head" if self.fused else "plain head"
        layers = "compiled" if self.compile else "not compiled"
        more = f"{', recomputation' if self.recompute else ''}{', prompts once' if self.shared else ''}"
        return f"{self.strategy}, {layers}, {head}{more}, lengths {self.lengths}"


VARIANTS = (
    Variant("megatron", compile=True),
    Variant("single"),
    Variant("single", compile=True),
    Variant("megatron"),
    Variant("single", compile=True, shared=True),
    Variant("single", compile=True, recompute=True),
    Variant("megatron", compile=True, recompute=True),
    Variant("single", recompute=True),
    Variant("megatron", recompute=True),
    Variant("single", lengths="log-uniform"),
    Variant("megatron", lengths="log-uniform"),
    Variant("single", fused=False),
    Variant("megatron", fused=False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["0.5B", "1.5B"])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=20_480)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", type=int, help="indices of the variants to run")
    parser.add_argument("--device", default="cuda", help="cpu only tries the program, with a tiny shape of its own")
    args = parser.parse_args()
    device = torch.device(args.device)
    rate = matrix_rate() if device.type == "cuda" else 1e12
    print(json.dumps({"torch": torch.__version__, "matrix_tflops": round(rate / 1e12)}), flush=True)
    chosen = VARIANTS if args.only is None else [VARIANTS[index] for index in args.only]
    for shape in args.shapes if device.type == "cuda" else ["tiny"]:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            save_random_model(Path(folder), shape, device)
            attempt(partial(compare, Path(folder), shape, device))
            for variant in chosen:
                attempt(partial(measure, variant, Path(folder), shape, args, rate, device))


def attempt(step: Callable[[], dict[str, object]]) -> None:
    """Print what a step found, or why it failed: one variant must not cost the others their time on the device."""
    try:
        print(json.dumps(step()), flush=True)
    except (RuntimeError, ValueError, ImportError, AssertionError, TypeError, AttributeError) as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"[:500]}), flush=True)
        traceback.print_exc()
    torch._dynamo.reset()  # no variant may use up the recompilations of another
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def save_random_model(folder: Path, shape: str, device: torch.device) -> None:
    """A Qwen2 of the shape with random weights, as bf16 safetensors: both backends read the same file."""
    from transformers import AutoModelForCausalLM

    config = qwen2_config(shape)
    torch.manual_seed(0)
    with device:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def compare(folder: Path, shape: str, device: torch.device) -> dict[str, object]:
    """Log-probs of 8 rows by both backends. They differ by the rounding of bf16, in another order of sums."""
    batch = make_batch(8, "log-uniform")
    width = batch.tensors["responses"].shape[1]
    found: dict[str, Tensor] = {}
    for variant in (Variant("single"), Variant("megatron"), Variant("megatron", compile=True)):
        backend = build(variant, folder, device, trains=False)
        output = backend.forward([batch], ForwardOptions(last_tokens=width))[0].log_probs
        assert output is not None
        found[variant.name] = output[:, -width:].float().cpu()
        del backend
        gc.collect()
    mask = batch.tensors["response_mask"].bool()
    plain, *others = (log_probs[mask] for log_probs in found.values())
    differences = {name: (other - plain).abs() for name, other in zip(list(found)[1:], others, strict=True)}
    return {
        "shape": shape,
        "log_prob_mean": float(plain.mean()),
        **{f"{name}: log_prob_diff mean": float(difference.mean()) for name, difference in differences.items()},
        **{f"{name}: log_prob_diff max": float(difference.max()) for name, difference in differences.items()},
    }


def measure(
    variant: Variant, folder: Path, shape: str, args: argparse.Namespace, rate: float, device: torch.device
) -> dict[str, object]:
    """Median time of an update, and the peak of allocated memory during it."""
    before = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    backend = build(variant, folder, device, trains=True)
    actor = actor_of(backend, args, variant, args.rows)
    batch = make_batch(args.rows, variant.lengths, samples=8 if variant.shared else 1)
    tokens = int(batch.tensors["attention_mask"].sum())
    start, graphs = time.perf_counter(), num_graphs()
    # Optimizer state, kernels, the allocator's memory: two micro-batches of full size need them all.
    warm_up = batch[: min(args.rows, 64)]
    metrics = actor_of(backend, args, variant, len(warm_up)).update_policy(warm_up)
    synchronize(device)
    first, in_warm_up = time.perf_counter() - start, num_graphs() - graphs
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        actor.update_policy(batch)
        synchronize(device)
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    hf_config = backend.hf_config
    parameters = sum(tensor.numel() for _, tensor in backend.named_weights())
    flops = 6 * parameters * tokens + attention_flops(hf_config, batch)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {
        "variant": variant.name,
        "shape": shape,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "all_seconds": [round(t, 3) for t in times],
        "warm_up_seconds": round(first, 1),
        "graphs": [in_warm_up, num_graphs() - graphs - in_warm_up],
        "tokens_per_s": round(tokens / seconds),
        "mfu_of_measured_rate": round(flops / seconds / rate, 3),
        "peak_gib": round(peak, 1),
        "allocated_before_gib": round(before, 1),
        "grad_norm": round(metrics["actor/grad_norm"], 4),
    }


def actor_of(
    backend: TrainBackend, args: argparse.Namespace, variant: Variant, mini_batch_rows: int
) -> DataParallelPPOActor:
    config = ActorConfig(
        use_dynamic_bsz=True, ppo_max_token_len_per_gpu=args.max_tokens, use_prefix_grouper=variant.shared
    )
    return DataParallelPPOActor(
        config, backend, mini_batch_rows=mini_batch_rows, log_prob_limit=MicroBatchLimit(rows=8)
    )


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def build(variant: Variant, folder: Path, device: torch.device, *, trains: bool) -> TrainBackend:
    return build_policy(
        ModelConfig(
            path=str(folder),
            use_fused_kernels=variant.fused,
            enable_gradient_checkpointing=variant.recompute,
        ),
        strategy=variant.strategy,
        fsdp=FSDPConfig(),
        megatron=MegatronConfig(),
        optim=OptimConfig(lr=1e-6, total_training_steps=100) if trains else None,
        use_torch_compile=variant.compile,
        share_prefixes=variant.shared,
        device=device,
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
