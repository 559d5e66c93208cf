"""Minutes until a real model is as good: GSM8K on one GPU, dovetail's modes and TRL + vLLM, in turn, in one call.

All sides train the same model on the same prompts with the same reward, batch, lengths, learning rate and clipping:
128 prompts x 8 responses a step, two updates of 64 prompts. Accuracy is that of greedy responses to all test problems
(the last number counts), before the first step and every `--every` steps, outside the clock: dovetail's validations are
taken off its times, and TRL's weights are saved, which is taken off too, and validated by dovetail afterwards.

    python -m benchmarks.gpu.time_to_accuracy MODEL_FOLDER RAW_GSM8K_FOLDER --steps 60 --sides dovetail trl

Each side leaves a line of `curves.jsonl` in the folder: step, minutes since its first step began, accuracy. A side of
dovetail that is killed leaves what it had measured.
`--plot FILE` draws what the folder has, on any machine, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.grpo_step import StepClock
from benchmarks.gpu.workload import capture_trl_graphs, prepare_trl, spare_flashinfer
from dovetail.cli.option_types import number, output_file, output_folder, whole_number
from dovetail.observability.disk import write_text_atomically

PROMPTS, SAMPLES, MINI_BATCH, RESPONSE = 128, 8, 64, 320
LEARNING_RATE, CLIP_LOW, CLIP_HIGH = 3e-6, 0.2, 0.28
ENGINE_MEMORY = 0.4
AT_ONCE = 8  # saved weights that are validated side by side
UNCORRECTED = ["async_training.prox=recompute"]
RECOMPUTED = [*UNCORRECTED, "algorithm.rollout_correction.rollout_is=token"]


def stale(bound: int, *more: str) -> list[str]:
    """As many groups in flight, and sequences decoded at once, as the bound admits: so responses do get that old."""
    return [
        "async_training.mode=fully_async",
        f"async_training.max_staleness={bound}",
        f"async_training.max_in_flight={(1 + bound) * PROMPTS}",
        f"actor_rollout_ref.rollout.max_num_seqs={(1 + bound) * PROMPTS * SAMPLES}",
        *more,
    ]


DOVETAIL: dict[str, list[str]] = {
    "dovetail": [],
    "dovetail-partial": stale(2, "async_training.max_in_flight=160"),
    **{f"dovetail-stale-{bound}": stale(bound) for bound in (1, 4, 8)},
    "dovetail-stale-8-recomputed": stale(8, *RECOMPUTED),
    **{f"dovetail-stale-{bound}-uncorrected": stale(bound, *UNCORRECTED) for bound in (4, 8)},
    "dovetail-fp8": ["actor_rollout_ref.actor.fp8_recipe=rowwise"],
    "dovetail-vllm": ["actor_rollout_ref.rollout.name=vllm"],
    # With --set distill.teacher.path=FOLDER: on-policy distillation, without a reward.
    "dovetail-distill": ["trainer.method=distill", "distill.kl=top_k", "actor_rollout_ref.actor.optim.lr=1e-5"],
}
SIDES = (*DOVETAIL, "trl")
NAMES = {"trl": "TRL 1.16 + vLLM 0.26"}
STARTED = time.perf_counter()
ACCURACY = "val-core/openai/gsm8k/acc/mean@1"
SHOWN = (
    *(f"timing_s/{phase}" for phase in ("gen", "old_log_prob", "update_actor", "weight_sync")),
    *("async/staleness/mean", "async/staleness/max", "rollout_corr/eff_sample_size", "rollout_corr/kl"),
    *("critic/score/mean", "response_length/mean", "actor/entropy", "actor/pg_clipfrac"),
)
"""Means over the second half of the steps, kept beside a curve."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument(
        "data", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl; both folders come first"
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["dovetail", "trl"])
    parser.add_argument("--steps", type=whole_number(), default=60)
    parser.add_argument("--every", type=whole_number(), default=10, help="steps between two measurements of accuracy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=output_folder, default=Path("/tmp/dovetail-accuracy"))
    parser.add_argument("--trl-micro-batch", type=whole_number(), default=64, help="without gradient checkpointing")
    parser.add_argument(
        "--trl-liger", action=argparse.BooleanOptionalAction, default=True, help="Liger's kernels in TRL's layers"
    )
    parser.add_argument(
        "--trl-graphs", action=argparse.BooleanOptionalAction, default=True, help="graphs for all rows in TRL's vLLM"
    )
    parser.add_argument(
        "--trl-minutes", type=number(above=True), default=60.0, help="TRL ends early rather than take longer"
    )
    parser.add_argument("--set", nargs="*", default=[], help="more keys of dovetail's sides")
    parser.add_argument("--plot", type=output_file, help="a picture of the folder's curves instead of a run")
    parser.add_argument("--run", choices=(*SIDES, "accuracy"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plot:
        plot((args.folder / "curves.jsonl").read_text().splitlines(), args.plot)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.run:
        run = {"trl": run_trl, "accuracy": run_accuracy}.get(args.run, run_dovetail)
        (args.folder / f"{args.run}.json").write_text(json.dumps(run(args)))
        return
    failed = []
    for side in args.sides:
        curve = in_process(side, args)
        if curve is None:
            failed.append(side)
            continue
        # A folder instead of a number: weights that are measured now that their trainer has left the device.
        saved = [point for point in curve["points"] if isinstance(point[2], str)]
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            for point, accuracy in zip(saved, pool.map(lambda point: accuracy_of(point[2], args), saved), strict=True):
                point[2] = accuracy
        with (args.folder / "curves.jsonl").open("a") as lines:
            lines.write(json.dumps({"side": side, "seed": args.seed, **curve}) + "\n")
        print(side, f"seed {args.seed}, {curve['step_s']:.2f} s a step (median), start {curve['start_s']:.0f} s")
        for step, minutes, accuracy in curve["points"]:
            print(f"  step {step:3}  {minutes:6.2f} min  {accuracy:6.2%}", flush=True)
        if "second_half" in curve:
            print(" ", {name: round(value, 4) for name, value in curve["second_half"].items()}, flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def plot(lines: list[str], file: Path) -> None:
    """Accuracy against minutes; a side's seeds have one colour."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from dovetail.dashboard.report import COLOURS, STYLE

    curves = [json.loads(line) for line in lines]
    colours = dict(zip(dict.fromkeys(curve["side"] for curve in curves), COLOURS, strict=False))
    with rc_context({**STYLE, "font.size": 12}):
        figure = Figure(figsize=(10.8, 4.4), dpi=100, layout="constrained")
        axes = figure.subplots()
        for curve in curves:
            _, minutes, accuracies = zip(*curve["points"], strict=True)
            colour, name = colours[curve["side"]], NAMES.get(curve["side"], curve["side"])
            axes.plot(minutes, [100 * accuracy for accuracy in accuracies], "-o", color=colour, label=name)
            last = curve["points"][-1]
            text = f"step {last[0]}: {last[2]:.1%}"
            axes.annotate(text, (last[1], 100 * last[2]), (0, -20), textcoords="offset points", ha="right")
        axes.set(xlabel="minutes of training", ylabel="GSM8K, % of all test problems, greedy")
        axes.margins(y=0.15)
        axes.legend(loc="lower right", frameon=False)
        figure.savefig(file)


def accuracy_of(model: str, args: argparse.Namespace) -> float:
    """Greedy accuracy of saved weights, which are deleted unless they are those that the sides began with."""
    folder = args.folder / f"accuracy-{Path(model).name}"
    folder.mkdir(exist_ok=True)
    measured = in_process("accuracy", args, model=model, folder=folder)
    if model != str(args.model):
        shutil.rmtree(model)
    return measured["accuracy"] if measured else float("nan")


def in_process(name: str, args: argparse.Namespace, model: str | None = None, folder: Path | None = None) -> Any:
    """One side in a process of its own, so that its device memory is gone afterwards; None when it failed."""
    folder = folder or args.folder
    result, log = folder / f"{name}.json", folder / f"{name}.log"
    result.unlink(missing_ok=True)
    arguments = [model or sys.argv[1], *sys.argv[2:], "--folder", str(folder)]
    command = [sys.executable, "-m", "benchmarks.gpu.time_to_accuracy", *arguments, "--run", name]
    with log.open("w") as stream:
        ended = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT)
    if ended.returncode:
        print(f"{name} failed; last lines of {log}:", *log.read_text(errors="replace").splitlines()[-25:], sep="\n")
    return json.loads(result.read_text()) if result.exists() else None


def write_data(args: argparse.Namespace) -> Path:
    """The same parquet files for every side."""
    out = args.folder / "data"
    if not (out / "test.parquet").exists():
        command = [sys.executable, "-m", "dovetail.cli.main", "data", "gsm8k", str(args.data), "--out", str(out)]
        subprocess.run(command, check=True)
    return out


def make_config(args: argparse.Namespace, model: Path, run: str, more: list[str]) -> Any:
    from dovetail.config import load_config

    data, policy = write_data(args), "actor_rollout_ref"
    return load_config(
        overrides=[
            f"data.train_files={data}/train.parquet",
            f"data.val_files={data}/test.parquet",
            f"data.train_batch_size={PROMPTS}",
            "data.max_prompt_length=384",
            "data.filter_overlong_prompts=True",
            f"data.max_response_length={RESPONSE}",
            f"{policy}.model.path={model}",
            f"{policy}.model.use_fused_kernels=True",
            f"{policy}.model.enable_gradient_checkpointing=False",
            f"{policy}.rollout.n={SAMPLES}",
            f"{policy}.rollout.max_num_seqs={PROMPTS * SAMPLES}",
            f"{policy}.rollout.gpu_memory_utilization={ENGINE_MEMORY}",
            f"{policy}.actor.ppo_mini_batch_size={MINI_BATCH}",
            f"{policy}.actor.use_dynamic_bsz=True",
            f"{policy}.actor.ppo_max_token_len_per_gpu=40960",
            f"{policy}.actor.clip_ratio_low={CLIP_LOW}",
            f"{policy}.actor.clip_ratio_high={CLIP_HIGH}",
            f"{policy}.actor.optim.lr={LEARNING_RATE}",
            f"{policy}.actor.optim.weight_decay=0",
            "custom_reward_function.reward_kwargs.method=flexible",
            "algorithm.adv_estimator=grpo",
            "reward_model.num_workers=8",
            f"trainer.device={args.device}",
            "trainer.n_gpus_per_node=1",
            f"trainer.total_training_steps={args.steps}",
            f"trainer.test_freq={args.every}",
            "trainer.val_before_train=True",
            "trainer.save_freq=-1",
            f"trainer.seed={args.seed}",
            f"trainer.default_local_dir={args.folder}/run-{run}-{os.getpid()}",
            "trainer.resume_mode=disable",
            *more,
            *args.set,
        ]
    ).config


def run_dovetail(args: argparse.Namespace) -> dict[str, Any]:
    from dovetail.trainer.run import run_training

    logging.basicConfig(level=logging.INFO)
    spare_flashinfer()
    config = make_config(args, args.model, args.run, DOVETAIL[args.run])
    clock = CurveClock(args.folder / f"{args.run}.json")
    run_training(config, use_ray=False, console=lambda title, total: clock)
    return clock.curve()


class CurveClock(StepClock):
    """Accuracy against minutes without the validations. Written at each, so that a side that is killed keeps it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.points, self.seconds = file, [(0, 0.0, math.nan)], list[float]()

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().end_step(step, metrics)
        if step == 0:
            self.points = [(0, 0.0, metrics[ACCURACY])]
            return
        self.seconds.append(self.step_seconds()[-1] - metrics.get("timing_s/testing", 0.0))
        if ACCURACY in metrics:
            self.points.append((step, sum(self.seconds) / 60, metrics[ACCURACY]))
            print(f"{self.points[-1][1]:.2f} min, {metrics[ACCURACY]:.2%}", flush=True)
            write_text_atomically(self.file, json.dumps(self.curve()))

    def curve(self) -> dict[str, Any]:
        later = self.metrics[len(self.metrics) // 2 :]
        means = {name: sum(row.get(name, 0.0) for row in later) / len(later) for name in SHOWN if name in later[-1]}
        start = self.ends[0] - STARTED  # with the first validation
        step_s = median(self.seconds)
        return {
            "points": self.points,
            "step_s": step_s,
            "steps_s": self.seconds,
            "start_s": start,
            "second_half": means,
        }


def run_trl(args: argparse.Namespace) -> dict[str, Any]:
    """TRL's GRPO trainer with vLLM in the same process, at the settings that a search on workload W found fastest."""
    prepare_trl()
    import pyarrow.parquet
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from dovetail.rewards.rules.gsm8k import compute_score

    if args.device == "cuda" and args.trl_graphs:
        capture_trl_graphs(PROMPTS * SAMPLES)
    updates = PROMPTS // MINI_BATCH  # optimizer steps of TRL for one step of dovetail
    prompts = args.folder / "prompts.jsonl"
    with prompts.open("w") as lines:
        for row in pyarrow.parquet.read_table(write_data(args) / "train.parquet").to_pylist():
            lines.write(json.dumps({"prompt": row["prompt"], "truth": row["reward_model"]["ground_truth"]}) + "\n")
    rows = load_dataset("json", data_files=str(prompts), split="train")
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    ends: list[float] = []
    spent = [0.0]  # saving weights, off the clock
    saved: list[tuple[int, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *unused: Any, **also_unused: Any) -> None:
            if not ends:
                ends.append(time.perf_counter())

        def on_step_end(self, arguments: Any, state: Any, control: Any, model: Any = None, **unused: Any) -> None:
            torch.cuda.synchronize() if torch.cuda.is_available() else None
            ends.append(time.perf_counter() - spent[0])
            print(f"optimizer step {state.global_step}: {ends[-1] - ends[0]:.1f} s since the first began", flush=True)
            if state.global_step % (args.every * updates) == 0:
                step = state.global_step // updates
                saved.append((step, (ends[-1] - ends[0]) / 60))
                began = time.perf_counter()
                folder = args.folder / f"trl-{step}"
                weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
                model.save_pretrained(folder, state_dict=weights)
                tokenizer.save_pretrained(folder)
                spent[0] += time.perf_counter() - began
                control.should_training_stop |= saved[-1][1] * (step + args.every) / step > args.trl_minutes

    def reward(completions: list[Any], truth: list[str], **unused: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [compute_score(text, own, method="flexible")["score"] for text, own in zip(texts, truth, strict=True)]

    config = trl_config(
        args.folder,
        args.device,
        micro_batch=args.trl_micro_batch,
        liger=args.trl_liger,
        max_steps=args.steps * updates,
        seed=args.seed,
    )
    trainer = GRPOTrainer(
        model=str(args.model),
        reward_funcs=reward,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    seconds = [end - start for start, end in zip(ends, ends[updates:], strict=False)][::updates]
    points = [(0, 0.0, str(args.model)), *((step, minutes, f"{args.folder}/trl-{step}") for step, minutes in saved)]
    start = ends[0] - STARTED
    return {"points": points, "step_s": median(seconds), "steps_s": seconds, "start_s": start}


def trl_config(
    folder: Path,
    device: str,
    *,
    prompts: int = PROMPTS,
    mini_batch: int = MINI_BATCH,
    micro_batch: int,
    liger: bool = False,
    **others: Any,
) -> Any:
    """What dovetail's sides do, as TRL's options; `benchmarks.gpu.trl_settings` finds the fastest micro-batch."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder / "trl"),
        num_generations=SAMPLES,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=mini_batch * SAMPLES // micro_batch,
        steps_per_generation=prompts * SAMPLES // micro_batch,
        max_completion_length=RESPONSE,
        temperature=1.0,
        beta=0.0,
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        loss_type="dapo",  # the mean over all tokens of an update, as dovetail's token-mean
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        bf16=device == "cuda",
        gradient_checkpointing=False,
        use_liger_kernel=liger,
        ddp_find_unused_parameters=False,  # a walk over the graph in every micro-batch
        use_vllm=device == "cuda",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=ENGINE_MEMORY,
        vllm_max_model_length=384 + RESPONSE,
        vllm_importance_sampling_correction=False,  # as on dovetail's sides
        generation_kwargs={"detokenize": False} if device == "cuda" else None,  # TRL decodes the ids itself
        use_cpu=device == "cpu",
        logging_steps=prompts // mini_batch,
        save_strategy="no",
        report_to=[],
        **others,
    )


def run_accuracy(args: argparse.Namespace) -> dict[str, Any]:
    """Greedy accuracy of `args.model` on the test problems."""
    from dovetail.trainer.run import run_training

    few = f"actor_rollout_ref.rollout.gpu_memory_utilization={ENGINE_MEMORY / AT_ONCE}"
    config = make_config(args, args.model, "accuracy", ["trainer.val_only=True", few])
    return {"accuracy": run_training(config, use_ray=False).validation[ACCURACY]}


if __name__ == "__main__":
    main()
