"""vLLM as dovetail's engine on one GPU, in the trainer's process (`mode=sync`) and in one of its own (`mode=async`).

Workload W at 512 sequences: how long generation takes, and how long new weights take to arrive, in place, through
shared device memory and through the host's shared memory. Every mode starts in a process of its own.

    python -m benchmarks.gpu.vllm_modes
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.generate import WORKLOADS, Workload, timed
from benchmarks.gpu.workload import spare_flashinfer, write_workload
from dovetail.rollout.vllm import VLLMEngine, VLLMSettings

MODES = ("sync", "async")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5B")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dovetail-workload"))
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = args.folder / args.shape
    if args.mode:
        found = measure(args.mode, folder / "model", WORKLOADS["w512"], args.repeats)
        (folder / f"mode-{args.mode}.json").write_text(json.dumps(found))
        return
    if not (folder / "model" / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_workload(folder, args.shape)
    results = {}
    for mode in MODES:
        command = [sys.executable, "-m", "benchmarks.gpu.vllm_modes", "--mode", mode, "--folder", str(args.folder)]
        subprocess.run([*command, "--shape", args.shape, "--repeats", str(args.repeats)], check=True)
        results[mode] = json.loads((folder / f"mode-{mode}.json").read_text())
        print(json.dumps({mode: results[mode]}), flush=True)
    print(table(results))


def measure(mode: str, model: Path, work: Workload, repeats: int) -> dict[str, Any]:
    spare_flashinfer()
    weights = list(bf16_weights(model))
    settings = VLLMSettings(
        str(model),
        max_model_len=work.longest,
        max_num_seqs=work.num_sequences,
        max_num_batched_tokens=65_536,
        gpu_memory_utilization=0.4,
    )
    if mode == "sync":
        with VLLMEngine(settings) as engine:
            return measure_engine(engine, weights, work, repeats, paths={"in place": None})
    from dovetail.controller.cluster import start_ray, stop_ray
    from dovetail.rollout.vllm.ray_engine import RayVLLMEngine, beside_this_process

    device = torch.device("cuda", torch.cuda.current_device())
    start_ray(num_cpus=2, object_store_memory=256 << 20)
    with RayVLLMEngine(settings, shares=device, **beside_this_process(device)) as actor:
        found = measure_engine(
            actor, weights, work, repeats, paths={"shared device memory": actor._shares, "shared memory": None}
        )
    stop_ray()
    return found


def measure_engine(engine: Any, weights: Any, work: Workload, repeats: int, *, paths: dict[str, Any]) -> dict[str, Any]:
    """`paths`: what weights go through, and the device whose memory is shared for it."""
    found: dict[str, Any] = {"weights_gb": round(sum(tensor.nbytes for _, tensor in weights) / 1e9, 2)}
    for path, shares in paths.items():
        engine._shares = shares
        times, _ = timed(lambda: engine.update_weights(weights, 1), repeats + 1)
        found[f"weights_s, {path}"] = [round(value, 3) for value in times[1:]]
    engine.generate(work.requests("warm", limit=32))
    times, _ = timed(lambda: engine.generate(work.requests("run")), repeats)
    found["generate_s"] = [round(value, 2) for value in times]
    found["tokens_per_s"] = round(work.num_tokens / statistics.median(times))
    return found


def bf16_weights(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda()
    for name, tensor in network.named_parameters():
        yield name, tensor.detach()


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = []
    for mode, found in results.items():
        shown = statistics.median(found["generate_s"])
        lines.append(f"mode={mode}: generate {shown:.2f} s, {found['tokens_per_s']:,} tokens/s")
        for name, times in found.items():
            if name.startswith("weights_s"):
                lines.append(f"  weights, {name.removeprefix('weights_s, ')}: {statistics.median(times):.3f} s")
    ratio = statistics.median(results["async"]["generate_s"]) / statistics.median(results["sync"]["generate_s"])
    return "\n".join([*lines, f"async takes {ratio:.2f} times as long to generate"])


if __name__ == "__main__":
    main()
