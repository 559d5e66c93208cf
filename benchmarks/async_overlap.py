"""Generation and training at the same time, on one core each: what a step takes beside either of them alone.

GRPO on a random model, 16 prompts x 4 responses a step, one trainer process and one engine process, each pinned to a
core with one thread; the driver, Ray and the scoring processes share the trainer's core. The length of a draw's
responses is forced from `traces/lengths.json` (log-normal, 99th percentile ten times the median). Sides, one after the
other, each a whole run on Ray:

    sync          the same two processes take turns; its parts are generation and training alone, each drained
    one_step_off  the next batch is generated while this one trains: at best the longer of sync's two parts; as lengths
                  differ from batch to batch, the median of each step's longer part is beside it
    generation    fully_async, whose trainer updates nothing: generation alone, never drained
    fully_async   at best the longer of `generation` and sync's training

Two cores say how much of one side hides behind the other, not what a cluster's speed is.

    python -m benchmarks.async_overlap [--steps 12] [--sides sync fully_async]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.grpo_step import StepClock
from dovetail.config import load_config
from dovetail.config.root import DovetailConfig
from dovetail.protocol import DataProto
from dovetail.trainer.async_plan import make_async_plan
from dovetail.trainer.ppo import RayPPOTrainer
from dovetail.trainer.prompt_draws import stable_seed
from dovetail.trainer.run_speeds import read_records
from dovetail.workers.actor_rollout_ref import ActorRolloutRefWorker
from dovetail.workers.rollout_worker import RolloutWorker

PROMPTS, SAMPLES, LONGEST, SEED = 16, 4, 640, 1
EPOCHS = 1
"""Passes over a batch: training takes about as long as generation then, which is where overlap is hardest."""
TRACE = Path(__file__).parent / "traces" / "lengths.json"
TRAINER_CORE, ENGINE_CORE = 0, 1
WARM_UP = 4
"""Steps that are left out: the first ones start processes' caches and fill the buffer."""

STALENESS = 2
"""As many steps at the end are left out too: nothing is generated for the steps after them."""
FULLY_ASYNC = ["async_training.mode=fully_async", f"async_training.max_staleness={STALENESS}"]
SIDES = {
    "sync": ["algorithm.rollout_correction.bypass_mode=True"],  # as the others, so that all compute the same
    "one_step_off": ["async_training.mode=one_step_off"],
    "generation": FULLY_ASYNC,
    "fully_async": FULLY_ASYNC,
}


class PinnedTrainer(ActorRolloutRefWorker):
    def __init__(self, *args: Any, **options: Any) -> None:
        pin(TRAINER_CORE)
        super().__init__(*args, **options)


class PinnedEngine(RolloutWorker):
    def __init__(self, *args: Any, **options: Any) -> None:
        pin(ENGINE_CORE)
        force_lengths()
        super().__init__(*args, **options)


class GenerationAlone(RayPPOTrainer):
    """Takes batches as a trainer does, sends the weights on as they are, and trains on nothing."""

    def _call(self, method: Any, batch: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {}})


def pin(core: int) -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})


def force_lengths() -> None:
    """Every draw's responses get the length that the trace has at its number."""
    from dovetail.workers import group_stream, rollout_worker

    trace = json.loads(TRACE.read_text())
    lengths = {stable_seed(SEED, f"draw-{number}"): trace[number % len(trace)] for number in range(1 << 12)}
    plain = rollout_worker.requests_of

    def with_lengths(prompts: Any, *args: Any, **options: Any) -> Sequence[Any]:
        seeds = prompts.non_tensor_batch["sampling_seed"]
        return [
            replace(request, sampling=replace(request.sampling, max_new_tokens=lengths[int(seed)]))
            for request, seed in zip(plain(prompts, *args, **options), seeds, strict=True)
        ]

    rollout_worker.requests_of = group_stream.requests_of = with_lengths


def write_workload(folder: Path, steps: int) -> None:
    """A model of 2 layers, 256 wide; prompts; a reward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from dovetail.demo.toy import save_toy_model

    save_toy_model(folder / "model")
    config = LlamaConfig.from_pretrained(folder / "model", hidden_size=256, intermediate_size=1024)
    config.num_attention_heads, config.num_key_value_heads, config.max_position_embeddings = 8, 2, 1024
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "random",
            "prompt": [{"role": "user", "content": f"say {number}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for number in range(PROMPTS * (steps + 8))
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(solution_str) % 7)\n"
    )


def make_config(side: str, folder: Path, steps: int) -> DovetailConfig:
    policy = "actor_rollout_ref"
    return load_config(
        overrides=[
            f"data.train_files={folder}/prompts.jsonl",
            f"data.train_batch_size={PROMPTS}",
            "data.max_prompt_length=32",
            f"data.max_response_length={LONGEST}",
            "data.shuffle=False",
            f"{policy}.hybrid_engine=False",
            f"{policy}.model.path={folder}/model",
            f"{policy}.model.enable_gradient_checkpointing=False",
            f"{policy}.actor.ppo_mini_batch_size={PROMPTS}",
            f"{policy}.actor.ppo_epochs={EPOCHS}",
            f"{policy}.actor.use_dynamic_bsz=True",
            f"{policy}.actor.ppo_max_token_len_per_gpu=4096",
            f"{policy}.actor.optim.lr=1e-6",
            f"{policy}.actor.fsdp_config.mixed_precision.param_dtype=float32",
            f"{policy}.rollout.dtype=float32",
            f"{policy}.rollout.n={SAMPLES}",
            f"{policy}.rollout.nnodes=1",
            f"{policy}.rollout.n_gpus_per_node=1",
            f"{policy}.rollout.ignore_eos=True",
            f"{policy}.rollout.max_num_seqs={PROMPTS * SAMPLES}",
            "algorithm.adv_estimator=grpo",
            f"custom_reward_function.path={folder}/reward.py",
            f"trainer.seed={SEED}",
            f"trainer.total_training_steps={steps}",
            "trainer.n_gpus_per_node=1",
            "trainer.device=cpu",
            "trainer.val_before_train=False",
            "trainer.save_freq=-1",
            f"trainer.default_local_dir={folder}/run-{side}",
            "trainer.resume_mode=disable",
            *SIDES[side],
        ]
    ).config


def run_side(side: str, folder: Path, steps: int) -> dict[str, Any]:
    from dovetail.trainer import groups
    from dovetail.trainer.run import run_training

    pin(TRAINER_CORE)  # this process is the driver; what it starts inherits the core, engines choose theirs
    groups.ActorRolloutRefWorker, groups.RolloutWorker = PinnedTrainer, PinnedEngine  # type: ignore[misc]
    config = make_config(side, folder, steps)
    clock = StepClock()
    trainer = GenerationAlone if side == "generation" else RayPPOTrainer
    run_training(config, trainer_class=trainer, console=lambda title, total: clock)
    steady = slice(WARM_UP, steps - STALENESS)
    later = clock.metrics[steady]

    def values(name: str) -> list[float]:
        return [round(metrics.get(name, 0.0), 2) for metrics in later]

    return {
        "step_s": [round(seconds, 2) for seconds in clock.step_seconds()[steady]],
        "gen_s": values("timing_s/gen"),
        "update_s": values("timing_s/update_actor"),
        "weight_sync_s": values("timing_s/weight_sync"),
        "tokens": values("perf/total_num_tokens"),
        "staleness": values("async/staleness/mean"),
    }


def summary(results: Mapping[str, Mapping[str, Sequence[float]]], folder: Path, steps: int) -> str:
    """Medians, each side against its bound, and against what `dovetail check --like` predicts from the sync run."""
    sync = results["sync"]
    medians = {side: statistics.median(result["step_s"]) for side, result in results.items()}
    generation = statistics.median(sync["gen_s"])
    updates = [step - gen for step, gen in zip(sync["step_s"], sync["gen_s"], strict=True)]
    training = statistics.median(updates)
    # A step that trains on one batch while the next is generated takes the longer of these two, in every step anew.
    pairs = statistics.median(map(max, zip(sync["gen_s"][1:], updates[:-1], strict=True)))
    lines = [f"sync: {medians['sync']:.2f} s, of which generation {generation:.2f} s and training {training:.2f} s"]
    records = read_records(folder / "run-sync")
    bounds = {"one_step_off": generation, "fully_async": medians.get("generation")}
    for side, alone in bounds.items():
        if side not in medians or alone is None:
            continue
        plan = make_async_plan(make_config(side, folder, steps), records)
        assert plan is not None, "the sides are asynchronous"
        assert plan.prediction is not None, "there are records"
        bound, step, predicted = max(alone, training), medians[side], plan.prediction
        lines.append(
            f"{side}: {step:.2f} s; max(generation {alone:.2f}, training {training:.2f}) {step / bound - 1:+.1%}; "
            f"sync {step / medians['sync'] - 1:+.1%}; staleness {statistics.median(results[side]['staleness']):.2f}; "
            f"predicted {predicted.step_s:.2f} s ({predicted.step_s / step - 1:+.1%}), staleness "
            f"{predicted.staleness_mean:.2f}, engine idle {predicted.engine_idle:.0%}, trainer "
            f"{predicted.trainer_idle:.0%}"
        )
        if side == "one_step_off":
            lines.append(f"{side}: the longer of each step's two parts {pairs:.2f} s {step / pairs - 1:+.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--run", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < WARM_UP + STALENESS + 2:
        parser.error(
            f"--steps is at least {WARM_UP + STALENESS + 2}: the first {WARM_UP} and last {STALENESS} are left out"
        )
    if args.run:
        print(json.dumps(run_side(args.run, args.folder, args.steps)), flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="dovetail-overlap-") as name:
        folder = Path(name)
        write_workload(folder, args.steps)
        results: dict[str, dict[str, list[float]]] = {}
        for side in args.sides:
            command = [sys.executable, "-m", "benchmarks.async_overlap", "--run", side, "--folder", name]
            log = folder / f"{side}.log"
            with log.open("w") as stream:
                done = subprocess.run([*command, "--steps", str(args.steps)], stdout=stream, stderr=subprocess.STDOUT)
            lines = log.read_text(errors="replace").splitlines()
            print(side, lines[-1] if done.returncode == 0 else "\n".join(lines[-40:]), flush=True)
            if done.returncode == 0:
                results[side] = json.loads(lines[-1])
        if "sync" in results:
            print(summary(results, folder, args.steps))


if __name__ == "__main__":
    main()
