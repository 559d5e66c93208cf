"""Generation with log-probs on one GPU: the embedded engine, and vLLM beside it where it is installed.

Random bf16 weights of Qwen2.5's shapes, forced lengths, temperature 1, the log-prob of every sampled token. Each row of
the table has the time that the device's own bandwidth and matrix rate, measured in the same process, allow for the
same tokens. Run on a CUDA machine: ``python -m benchmarks.gpu.generate`` (``--profile`` adds the decode step by
kernel, ``--check`` the gap of the log-probs to a full forward).
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.gpu.shapes import VOCABULARY, qwen2_config
from benchmarks.gpu.update_policy import matrix_rate
from benchmarks.gpu.workload import spare_flashinfer
from dovetail.rollout import GenerationRequest, GenerationResult, SamplingParams
from dovetail.rollout.native.engine import NativeEngine

# A 99th percentile of ten times the median, log-normal.
TAIL_SIGMA = math.log(10) / 2.3263


@dataclass(frozen=True)
class Workload:
    name: str
    shape: str
    num_prompts: int
    n: int
    prompt: int
    response: int
    long_tail: bool = False

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.n

    def requests(self, tag: str, limit: int | None = None) -> list[GenerationRequest]:
        """`limit` cuts every response short: a warm-up."""
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, VOCABULARY, (self.num_prompts, self.prompt), generator=generator).tolist()
        return [
            GenerationRequest(
                f"{tag}{i}",
                prompt,
                SamplingParams(n=self.n, max_new_tokens=min(length, limit or length), ignore_eos=True, seed=i),
            )
            for i, (prompt, length) in enumerate(zip(prompts, self.lengths(), strict=True))
        ]

    def lengths(self) -> list[int]:
        """Response length of each prompt. A long tail has `response` as its median, and ends at 20 times that.

        Its quantiles are taken evenly, in random order: the percentiles are right for any number of prompts.
        """
        if not self.long_tail:
            return [self.response] * self.num_prompts
        order = torch.randperm(self.num_prompts, generator=torch.Generator().manual_seed(1))
        z = torch.special.ndtri((order + 0.5) / self.num_prompts)
        return (self.response * (TAIL_SIGMA * z).exp()).clamp(1, 20 * self.response).long().tolist()

    @property
    def num_tokens(self) -> int:
        return self.n * sum(self.lengths())

    @property
    def longest(self) -> int:
        return self.prompt + max(self.lengths())


WORKLOADS = {
    "w1024": Workload("W, 1024 sequences", "1.5B", 128, 8, 120, 512),
    "w512": Workload("W, 512 sequences", "1.5B", 64, 8, 120, 512),
    "tail": Workload("long tail, median 200, P99 2000", "1.5B", 1024, 1, 120, 200, long_tail=True),
    "groups": Workload("n=8, shared prompt of 1 k", "1.5B", 128, 8, 1024, 512),
    "0.5B": Workload("W, 1024 sequences, 0.5B", "0.5B", 128, 8, 120, 512),
    "7B": Workload("W, 1024 sequences, 7B", "7B", 128, 8, 120, 512),
}


@dataclass(frozen=True)
class Ceilings:
    """Of this device, measured here: bytes/s of a copy (read plus written), FLOP/s of a bf16 matrix product."""

    bandwidth: float
    matrix: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm-repeats", type=int, help="runs of vLLM, which takes longer (default: as --repeats)")
    parser.add_argument("--memory", type=float, default=0.8, help="share of the device that each engine may take")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out although it is installed")
    parser.add_argument("--check", action="store_true", help="compare log-probs with a full forward")
    parser.add_argument("--profile", type=Path, help="folder for tables of the decode step by kernel")
    args = parser.parse_args()
    ceilings = Ceilings(copy_bandwidth(), matrix_rate())
    print(f"copy {ceilings.bandwidth / 1e12:.2f} TB/s, bf16 product {ceilings.matrix / 1e12:.0f} TFLOP/s", flush=True)
    results = []
    for name in args.workloads:
        work = WORKLOADS[name]
        found = measure_native(work, args.repeats, ceilings, args.memory, check=args.check, profile=args.profile)
        print(json.dumps(found), flush=True)
        results.append(found)
        free_memory()
    if importlib.util.find_spec("vllm") is not None and not args.no_vllm:
        by_shape: dict[str, list[tuple[Workload, dict[str, Any]]]] = {}
        for found, name in zip(results, args.workloads, strict=True):
            by_shape.setdefault(WORKLOADS[name].shape, []).append((WORKLOADS[name], found))
        for rows in by_shape.values():
            repeats = args.vllm_repeats or args.repeats
            for work, measured in measure_vllm([work for work, _ in rows], repeats, args.memory):
                found = next(found for own, found in rows if own is work)
                found |= measured
                found["ratio"] = round(found["vllm_s"] / found["seconds"], 2)
                print(json.dumps(found), flush=True)
            free_memory()
    print(table(results))


def measure_native(
    work: Workload, repeats: int, ceilings: Ceilings, memory: float, *, check: bool, profile: Path | None
) -> dict[str, Any]:
    config = model_config(work)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    start = time.perf_counter()
    engine = NativeEngine(
        model,
        max_num_seqs=work.num_sequences,
        max_prefill_tokens=16_384,
        max_model_len=work.longest,
        gpu_memory_utilization=memory,
    )
    engine.generate(work.requests("start", limit=8))
    torch.cuda.synchronize()
    start_up = time.perf_counter() - start
    times, outputs = timed(lambda: engine.generate(work.requests("run")), repeats)
    seconds = statistics.median(times)
    limit = counted_limit(work, config, sum(p.numel() for p in model.parameters()), ceilings)
    found: dict[str, Any] = {
        "workload": work.name,
        "tokens": work.num_tokens,
        "seconds": round(seconds, 3),
        "all_seconds": [round(t, 3) for t in times],
        "tokens_per_s": round(work.num_tokens / seconds),
        "limit_tokens_per_s": round(work.num_tokens / limit),
        "share_of_limit": round(limit / seconds, 3),
        "start_up_s": round(start_up, 2),
        "kv_gib": round(engine.health().kv_cache_bytes / 2**30, 1),
    }
    if check:
        found |= log_prob_gaps(model, work, outputs)
    if profile is not None:
        profile_step(engine, work, profile)
    engine.close()
    return found


def measure_vllm(works: Sequence[Workload], repeats: int, memory: float) -> Iterator[tuple[Workload, dict[str, Any]]]:
    """vLLM well set: graphs up to the batch, no detokenisation, the log-prob of the sampled token and no other.

    One engine, large enough for all `works`, which are of one shape: it takes more than a minute to start.
    """
    spare_flashinfer()
    from vllm import LLM
    from vllm import SamplingParams as VllmSampling

    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(544, 1025, 32)]
    with tempfile.TemporaryDirectory() as folder:
        model_config(max(works, key=lambda work: work.longest)).save_pretrained(folder)
        start = time.perf_counter()
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_num_seqs=max(work.num_sequences for work in works),
            max_model_len=max(work.longest for work in works),
            max_num_batched_tokens=16_384,
            gpu_memory_utilization=memory,
            compilation_config={"cudagraph_capture_sizes": sizes},
        )
        start_up = time.perf_counter() - start
        print(f"vLLM is up after {start_up:.0f} s", flush=True)

        def generate(work: Workload, limit: int | None = None) -> object:
            asked = work.requests("run", limit)
            return llm.generate(
                [{"prompt_token_ids": list(request.prompt_token_ids)} for request in asked],
                [
                    VllmSampling(
                        n=request.sampling.n,
                        max_tokens=request.sampling.max_new_tokens,
                        ignore_eos=True,
                        detokenize=False,
                        logprobs=0,
                        temperature=1.0,
                    )
                    for request in asked
                ],
                use_tqdm=False,
            )

        for work in works:
            generate(work, limit=8)
            times, _ = timed(lambda work=work: generate(work), repeats)
            seconds = statistics.median(times)
            yield (
                work,
                {
                    "vllm_s": round(seconds, 3),
                    "vllm_all_s": [round(t, 3) for t in times],
                    "vllm_tokens_per_s": round(work.num_tokens / seconds),
                    "vllm_start_up_s": round(start_up, 1),
                },
            )
        llm.llm_engine.engine_core.shutdown()


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def timed(run: Callable[[], Any], repeats: int) -> tuple[list[float], Any]:
    times, result = [], None
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times, result


def model_config(work: Workload) -> Qwen2Config:
    longest = max(4096, work.longest)
    return qwen2_config(work.shape, max_position_embeddings=longest, architectures=["Qwen2ForCausalLM"])


def counted_limit(work: Workload, config: Qwen2Config, num_parameters: int, ceilings: Ceilings) -> float:
    """Seconds the device needs at least: every prompt once through the matrices; then for each step the slower of the
    matrix products and the reading of the weights, plus one reading of the running sequences' keys and values, those of
    a prompt once for all its samples.
    """
    lengths = work.lengths()
    head_size = config.hidden_size // config.num_attention_heads
    kv_bytes = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_size
    seconds = 2 * num_parameters * work.num_prompts * work.prompt / ceilings.matrix
    lengths.sort()
    finished = 0
    for step in range(lengths[-1]):
        while lengths[finished] <= step:
            finished += 1
        groups = len(lengths) - finished
        rows = groups * work.n
        products = max(2 * num_parameters * rows / ceilings.matrix, 2 * num_parameters / ceilings.bandwidth)
        seconds += products + (groups * work.prompt + rows * step) * kv_bytes / ceilings.bandwidth
    return seconds


@torch.no_grad()
def log_prob_gaps(model: Any, work: Workload, results: list[GenerationResult], num_checked: int = 16) -> dict[str, Any]:
    """Mean gaps of the sampled tokens' log-probs: the engine to a plain forward in bf16, and both to one in fp32."""
    prompts = {request.request_id: list(request.prompt_token_ids) for request in work.requests("run")}
    chosen = results[:: max(1, len(results) // num_checked)]
    engine = torch.cat([torch.tensor(result.log_probs) for result in chosen])

    def forward(network: Any) -> torch.Tensor:
        found = []
        for result in chosen:
            prompt = prompts[result.request_id]
            ids = torch.tensor([prompt + result.token_ids], device="cuda")
            logits = network(ids).logits[0, len(prompt) - 1 : -1].float()
            found.append(logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu())
        return torch.cat(found)

    plain = forward(model)
    model.set_attn_implementation("eager")
    eager = forward(model)
    # A copy: a model that comes back from float32 has its rotary frequencies rounded too.
    exact = forward(copy.deepcopy(model).float())
    model.set_attn_implementation("sdpa")

    def gap(a: torch.Tensor, b: torch.Tensor) -> float:
        return round(float((a - b).abs().mean()), 5)

    return {
        "gap_engine_bf16": gap(engine, plain),
        "gap_engine_fp32": gap(engine, exact),
        "gap_bf16_fp32": gap(plain, exact),
        "gap_bf16_sdpa_eager": gap(plain, eager),
        "bias_engine_fp32": round(float((engine - exact).mean()), 6),
    }


def profile_step(engine: NativeEngine, work: Workload, folder: Path) -> None:
    """The decode step by kernel at the middle of a response. Two runs that differ in their steps alone are compared, so
    that prefill drops out.
    """
    few, many = 4, 36
    prompt = work.prompt + work.response // 2
    # Distinct prompts: samples that share a prompt share cache lines too, which at this length would flatter.
    middle = Workload(work.name, work.shape, work.num_sequences, 1, prompt, many)
    engine.generate(middle.requests("warm", limit=few))
    long, short = (kernel_times(engine, middle.requests("profile", limit=count)) for count in (many, few))
    per_step = {
        name: ((total - short.get(name, (0.0, 0))[0]) / (many - few), (count - short.get(name, (0.0, 0))[1]))
        for name, (total, count) in long.items()
    }
    whole = sum(milliseconds for milliseconds, _ in per_step.values())
    lines = [
        f"{work.name}, sequences of {prompt} tokens: {whole:.3f} ms of kernels in a decode step",
        "ms  calls  kernel",
    ]
    lines += [
        f"{milliseconds:8.4f} {count / (many - few):6.1f}  {name[:110]}"
        for name, (milliseconds, count) in sorted(per_step.items(), key=lambda item: -item[1][0])[:24]
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"decode_{work.num_sequences}_{work.shape}_{work.response}.txt").write_text("\n".join(lines) + "\n")


def kernel_times(engine: NativeEngine, requests: list[GenerationRequest]) -> dict[str, tuple[float, int]]:
    """Milliseconds and calls of each kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        engine.generate(requests)
        torch.cuda.synchronize()
    return {event.key: (event.self_device_time_total / 1e3, event.count) for event in recorded.key_averages()}


def copy_bandwidth(size: int = 4 << 30, repeats: int = 5) -> float:
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    times, _ = timed(lambda: target.copy_(source), repeats)
    return 2 * size / statistics.median(times)


def table(results: list[dict[str, Any]]) -> str:
    header = "| workload | tokens | seconds | tokens/s | counted limit | share | start-up | vLLM tokens/s | ratio |"
    lines = [header, "|---" * 9 + "|"]
    for r in results:
        vllm = f"{r['vllm_tokens_per_s']:,} | {r['ratio']}x" if "vllm_s" in r else "- | -"
        lines.append(
            f"| {r['workload']} | {r['tokens']:,} | {r['seconds']} | {r['tokens_per_s']:,} | "
            f"{r['limit_tokens_per_s']:,} | {r['share_of_limit']:.0%} | {r['start_up_s']} s | {vllm} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
