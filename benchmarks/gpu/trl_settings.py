"""TRL's best settings for the update of GSM8K's comparison: micro-batches of several sizes, with Liger or not.

One of TRL's generation batches (two updates and the old log-probs before them) is timed at each setting through TRL's
own trainer, with a 0.5B model of random weights and responses of GSM8K's lengths instead of vLLM's. The last line is
the fastest setting as options of `benchmarks.gpu.time_to_accuracy`.

    python -m benchmarks.gpu.trl_settings
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.time_to_accuracy import RESPONSE, SAMPLES, trl_config
from benchmarks.gpu.workload import prepare_trl, write_workload

PROMPTS, ROUNDS = 32, 2  # a quarter of a step; the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--liger", nargs="+", type=int, choices=(0, 1), default=[0, 1])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dovetail-trl-settings"))
    args = parser.parse_args()
    prepare_trl()
    if not (args.folder / "model").exists():
        args.folder.mkdir(parents=True, exist_ok=True)
        write_workload(args.folder, args.shape, steps=1, device=args.device)
    found: dict[tuple[int, int], float] = {}
    for liger in args.liger:
        for micro_batch in args.micro_batches:
            try:
                seconds, peak = measure(args, micro_batch, bool(liger))
            except torch.OutOfMemoryError:
                print(f"micro-batches of {micro_batch}, Liger {bool(liger)}: out of memory", flush=True)
                continue
            finally:
                gc.collect()
                torch.cuda.empty_cache()
            found[micro_batch, liger] = seconds
            text = f"{seconds:.2f} s for {PROMPTS * SAMPLES} responses, peak {peak:.1f} GiB"
            print(f"micro-batches of {micro_batch}, Liger {bool(liger)}: {text}", flush=True)
    micro_batch, liger = min(found, key=lambda setting: found[setting])
    print(f"--trl-micro-batch {micro_batch}", "--trl-liger" if liger else "--no-trl-liger")


def measure(args: argparse.Namespace, micro_batch: int, liger: bool) -> tuple[float, float]:
    """Seconds of the last round and the peak of the device's memory in GiB."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    generator = torch.Generator().manual_seed(0)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *unused: Any, **also_unused: Any) -> None:
            torch.cuda.synchronize() if args.device == "cuda" else None
            ends.append(time.perf_counter())

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Prompts of 60 to 200 tokens, responses of about 180, one in a hundred as long as allowed."""
        lengths = torch.randn(len(prompts), generator=generator).mul(0.3).add(5.1).exp().clamp(20, RESPONSE).long()
        of_prompts = torch.randint(60, 200, (len(prompts) // SAMPLES,), generator=generator).repeat_interleave(SAMPLES)

        def random(lengths: torch.Tensor) -> list[list[int]]:
            return [torch.randint(300, 150_000, (int(n),), generator=generator).tolist() for n in lengths]

        responses = random(lengths)
        return {
            "prompt_ids": random(of_prompts),
            "completion_ids": responses,
            "logprobs": [[-1.0] * len(response) for response in responses],
        }

    def reward(completions: list[Any], **unused: Any) -> list[float]:
        return [float(index % 3) for index in range(len(completions))]

    texts = (args.folder / "prompts.txt").read_text().splitlines()
    prompts = [[{"role": "user", "content": text}] for text in texts]
    config = trl_config(
        args.folder, args.device, prompts=PROMPTS, mini_batch=PROMPTS // 2, micro_batch=micro_batch, liger=liger
    )
    config.use_vllm, config.max_steps = False, 2 * ROUNDS
    trainer = GRPOTrainer(
        model=str(args.folder / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(args.folder / "model", padding_side="left"),
        callbacks=[Clock()],
        rollout_func=rollout,
    )
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
    torch.cuda.reset_peak_memory_stats() if args.device == "cuda" else None
    return ends[-1] - ends[-3], peak


if __name__ == "__main__":
    main()
