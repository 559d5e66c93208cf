"""Whole GRPO steps on long-tailed lengths on one GPU: waiting for the longest response of a step, and not waiting.

128 prompts x 8 responses a step, 1.5B shape with random weights. The length of a prompt's responses is forced,
log-normal with a median of 200 tokens and a 99th percentile of 2,000, from one fixed list for both sides. `drained` is
the synchronous trainer; `carried` takes the groups that are finished and continues the others under the next weights
(`async_training.mode=fully_async` on the trainer's device). Both train on the same number of groups a step; tokens are
reported, because groups that finish first are shorter than the average until the engine is full. `trl` is TRL + vLLM,
whose micro-batches are padded to the longest response of the step.

    python -m benchmarks.gpu.partial_rollouts --steps 8
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.generate import TAIL_SIGMA
from benchmarks.gpu.grpo_step import StepClock, run_trl
from benchmarks.gpu.workload import write_workload

PROMPTS, SAMPLES, MEDIAN, LONGEST = 128, 8, 200, 3900
SEQUENCES = "actor_rollout_ref.rollout.max_num_seqs"
SIDES = {
    "drained": [f"{SEQUENCES}={PROMPTS * SAMPLES}"],  # all at once: its fastest
    "carried": [f"{SEQUENCES}=1024", "async_training.mode=fully_async", "async_training.max_staleness=8"],
    "kept": [
        f"{SEQUENCES}=1024",
        "async_training.mode=fully_async",
        "async_training.max_staleness=8",
        "async_training.max_in_flight=192",
        "actor_rollout_ref.rollout.kv_on_update=keep",
    ],
    "trl": [],
}
TRL_MICRO_BATCH = 4  # of up to 4,028 tokens each, without gradient checkpointing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dovetail-partial"))
    parser.add_argument("--shape", default="1.5B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--run", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        found = run_long_trl(args) if args.run == "trl" else run_side(args.run, args.folder, args.steps)
        (args.folder / f"{args.run}.json").write_text(json.dumps(found))
        return
    if not (args.folder / "model" / "config.json").exists():
        args.folder.mkdir(parents=True, exist_ok=True)
        write_workload(args.folder, args.shape, steps=2 * args.steps + 4, device=args.device)
    for side in args.sides:
        command = [sys.executable, "-m", "benchmarks.gpu.partial_rollouts", "--run", side, "--folder", str(args.folder)]
        result, log = args.folder / f"{side}.json", args.folder / f"{side}.log"
        result.unlink(missing_ok=True)
        with log.open("w") as stream:
            subprocess.run([*command, "--steps", str(args.steps)], stdout=stream, stderr=subprocess.STDOUT)
        # Not the log's last line: libraries say good-bye.
        lines = log.read_text(errors="replace").splitlines()
        print(side, result.read_text() if result.exists() else "\n".join(lines[-30:]), flush=True)


def run_long_trl(args: argparse.Namespace) -> dict[str, Any]:
    return run_trl(
        args.folder,
        args.steps,
        prompts=PROMPTS,
        response=LONGEST,
        micro_batch=TRL_MICRO_BATCH,
        lengths=long_tailed_lengths(),
    )


def run_side(side: str, folder: Path, steps: int) -> dict[str, Any]:
    from dovetail.config import load_config
    from dovetail.trainer.run import run_training

    force_lengths()
    work = count_engine_work()
    config = load_config(
        overrides=[
            f"data.train_files={folder}/prompts.jsonl",
            f"data.train_batch_size={PROMPTS}",
            "data.max_prompt_length=128",
            f"data.max_response_length={LONGEST}",
            f"actor_rollout_ref.model.path={folder}/model",
            "actor_rollout_ref.model.use_fused_kernels=True",
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            "actor_rollout_ref.rollout.ignore_eos=True",
            "actor_rollout_ref.rollout.max_num_batched_tokens=65536",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
            "algorithm.adv_estimator=grpo",
            f"custom_reward_function.path={folder}/reward.py",
            f"trainer.total_training_steps={steps}",
            "reward_model.num_workers=8",
            "trainer.n_gpus_per_node=1",
            "trainer.val_before_train=False",
            "trainer.save_freq=-1",
            f"trainer.default_local_dir={folder}/run-{side}-{os.getpid()}",
            "trainer.resume_mode=disable",
            *SIDES[side],
        ]
    ).config
    clock = StepClock()
    run_training(config, use_ray=False, console=lambda title, total: clock)
    later = clock.metrics[len(clock.metrics) // 2 :]  # the first steps fill the engine

    def median(name: str) -> float | None:
        values = [metrics[name] for metrics in later if name in metrics]
        return round(statistics.median(values), 3) if values else None

    return {
        "step_s": [round(seconds, 2) for seconds in clock.step_seconds()],
        "gen_s": [round(metrics["timing_s/gen"], 2) for metrics in clock.metrics],
        "tokens": [int(metrics["perf/total_num_tokens"]) for metrics in clock.metrics],
        "update_s": median("timing_s/update_actor"),
        "old_log_prob_s": median("timing_s/old_log_prob"),
        "staleness_mean": median("async/staleness/mean"),
        "engine_work": work,
        "staleness_max": max((metrics.get("async/staleness/max", 0.0) for metrics in clock.metrics), default=0.0),
    }


def count_engine_work() -> list[dict[str, float]]:
    """A record for each turn of the engine: prefilled tokens, decode steps, captures of graphs and their seconds."""
    from dovetail.rollout.native.cuda.graphs import DecodeSteps
    from dovetail.rollout.native.engine import NativeEngine
    from dovetail.workers.hybrid_engine import HybridEngine

    turns: list[dict[str, float]] = []
    captured = [0, 0.0]
    capture, trainer_mode = DecodeSteps._capture, HybridEngine.trainer_mode
    before: dict[str, float] = {}

    def timed_capture(steps: Any, *args: Any) -> None:
        begin = time.perf_counter()
        capture(steps, *args)
        captured[0] += 1
        captured[1] += time.perf_counter() - begin

    def noted(hybrid: Any) -> None:
        engine = hybrid.engine
        assert isinstance(engine, NativeEngine)
        now = {**asdict(engine._batch.stats), "captures": captured[0], "capture_s": round(captured[1], 3)}
        turn = {name: round(now[name] - before.get(name, 0), 3) for name in now}
        turns.append(turn | {"cache_gb": round(engine.health().kv_cache_bytes / 1e9, 1)})
        before.update(now)
        trainer_mode(hybrid)

    DecodeSteps._capture, HybridEngine.trainer_mode = timed_capture, noted  # pyrefly: ignore[bad-assignment]
    return turns


def long_tailed_lengths() -> list[int]:
    normal = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    return (MEDIAN * (TAIL_SIGMA * normal).exp()).clamp(1, LONGEST).long().tolist()


def force_lengths() -> None:
    """Every prompt's responses get the length that the fixed list has at its number."""
    from dovetail.workers import group_stream, hybrid_engine

    lengths = long_tailed_lengths()
    plain = hybrid_engine.requests_of

    def with_lengths(prompts: Any, *args: Any, **options: Any) -> Sequence[Any]:
        seeds = [int(seed) % len(lengths) for seed in prompts.non_tensor_batch["sampling_seed"]]
        return [
            replace(request, sampling=replace(request.sampling, max_new_tokens=lengths[seed]))
            for request, seed in zip(plain(prompts, *args, **options), seeds, strict=True)
        ]

    hybrid_engine.requests_of = group_stream.requests_of = with_lengths


if __name__ == "__main__":
    main()
