"""Train a real model on this machine: SmolLM2-135M-Instruct learns two-digit addition with GRPO, on a CPU, on Ray.

With `--agent` it learns to use a calculator instead, in conversations of two turns. Takes a few minutes on two cores,
and says after the first step how long it will take here. Prints accuracy on held-out problems, and some answers, before
and after.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.cli.option_types import output_folder, whole_number
from dovetail.config import load_config

NUM_TRAIN = 1000
SYSTEM = "Calculate."


@dataclass(frozen=True)
class Demo:
    """What differs between the two."""

    learns: str
    experiment: str
    folder: str
    steps: int
    num_test: int
    prompts_per_step: int
    prompt_length: int
    response_length: int


ADDITION = Demo("learns two-digit addition", "addition", "runs/demo", 20, 96, 8, 64, 16)
AGENT = Demo("learns to ask a calculator", "calculator", "runs/demo-agent", 7, 64, 4, 80, 32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--agent", action="store_true", help="learn to use a tool, a calculator, for products")
    parser.add_argument("--out", type=output_folder, help=f"run folder (default: {ADDITION.folder}, or {AGENT.folder})")
    parser.add_argument(
        "--steps", type=whole_number(), help=f"training steps (default: {ADDITION.steps}, or {AGENT.steps})"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of data, sampling and order (default: %(default)s)")
    parser.add_argument("--local", action="store_true", help="one process, without Ray")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the demo's configuration")


def run(args: argparse.Namespace) -> int:
    # Before torch is imported: worker processes inherit it, and more threads than cores only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    os.environ.setdefault("DOVETAIL_LOGGING_LEVEL", "WARNING")
    demo = AGENT if args.agent else ADDITION
    args.out, args.steps = args.out or Path(demo.folder), args.steps or demo.steps
    say(
        f"SmolLM2-135M-Instruct {demo.learns}: {args.steps} steps of GRPO on the CPU of this machine "
        f"({os.cpu_count()} cores)."
    )
    say("The time left is shown after the first step.")
    from transformers.utils.logging import disable_progress_bar

    from dovetail.demo.smollm2 import smollm2_folder
    from dovetail.trainer.run import run_training

    began = time.perf_counter()
    disable_progress_bar()
    model = smollm2_folder()
    say(f"Model: {model} ({time.perf_counter() - began:.0f} s; converted on the first run only)")
    data = args.out / "data"
    write_problems(demo, data, args.seed)
    overrides = [*demo_overrides(demo, model, data, args.out, args.steps, args.seed), *args.overrides]
    started = time.perf_counter()
    say("Starting, then measuring accuracy before training ...")
    result = run_training(load_config(overrides=overrides).config, use_ray=not args.local)
    if result.stopped_by is not None:
        say(f"Stopped after step {result.steps}. Run folder: {result.folder}")
        return 128 + result.stopped_by
    show(demo, result.folder, result.steps, time.perf_counter() - started)
    return 0


def write_problems(demo: Demo, folder: Path, seed: int) -> None:
    """`train.parquet` and `test.parquet`."""
    from dovetail.data.files import write_rows
    from dovetail.demo.calculator import generate_products
    from dovetail.demo.tasks import generate_task

    sizes = {"num_train": NUM_TRAIN, "num_test": demo.num_test, "seed": seed}
    if demo is AGENT:
        problems = generate_products(**sizes)
    else:
        problems = generate_task("addition", levels=[2], system=SYSTEM, **sizes)
    write_rows(problems.train, folder / "train.parquet")
    write_rows(problems.test, folder / "test.parquet")


def demo_overrides(demo: Demo, model: Path, data: Path, out: Path, steps: int, seed: int) -> list[str]:
    """The demo as a launch list: what you would type for your own run."""
    return [
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'test.parquet'}",
        f"data.train_batch_size={demo.prompts_per_step}",
        f"data.max_prompt_length={demo.prompt_length}",
        f"data.max_response_length={demo.response_length}",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.dtype=float32",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={demo.prompts_per_step}",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
        "actor_rollout_ref.actor.optim.lr=2e-5",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        f"trainer.float32_matmul_precision={fastest_precision()}",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}",
        # The trained weights, 0.65 GB, for the commands below; a demo is not continued, so no optimizer.
        f"trainer.save_freq={steps}",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
        "trainer.project_name=demo",
        f"trainer.experiment_name={demo.experiment}",
        f"trainer.default_local_dir={out}",
        "trainer.resume_mode=disable",
        f"trainer.seed={seed}",
        *(["actor_rollout_ref.rollout.agent.environment=dovetail.demo.calculator.Calculator"] if demo is AGENT else []),
    ]


def fastest_precision() -> str:
    """`medium` where this CPU has units for bfloat16; elsewhere its products take longer than plain ones. Timed."""
    import torch

    before, seconds = torch.get_float32_matmul_precision(), {}
    matrix = torch.ones(512, 512)
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            took = []
            for _ in range(4):
                start = time.perf_counter()
                matrix @ matrix
                took.append(time.perf_counter() - start)
            seconds[precision] = min(took)
    finally:
        torch.set_float32_matmul_precision(before)
    return min(seconds, key=seconds.__getitem__)


def show(demo: Demo, folder: Path, last_step: int, seconds: float) -> None:
    """Before and after, side by side."""
    before, after = _answers(folder, 0), _answers(folder, last_step)
    say("")
    say(f"Accuracy on {len(before)} held-out problems:")
    say(f"  before   {_accuracy(before):6.1%}")
    say(f"  after    {_accuracy(after):6.1%}   ({last_step} steps of GRPO, {seconds / 60:.1f} minutes)")
    say("")
    for old, new in list(zip(before, after, strict=True))[:3]:
        say(f"  {old['prompt']}")
        say(f"    before  {_short(_said(old))}")
        say(f"    after   {_short(_said(new))}   (right: {old['ground_truth']})")
    say("")
    say(f"Run folder: {folder}  (metrics.jsonl, rollouts/, validation/, global_step_N/, config.yaml, plan.json)")
    if shutil.which("dovetail") is None:
        say(f"activate the environment: source {Path(sys.executable).parent / 'activate'}")
    say(f"look at it in a browser:  dovetail dashboard {folder}")
    if demo is ADDITION:  # an agent is no use without its calculator
        say(f'ask the trained model:    dovetail generate {folder} --system {SYSTEM} "{before[0]["prompt"]}"')
    say(f"export the model:         dovetail export {folder} {demo.experiment}-model   (a Hugging Face folder)")
    say(f"repeat the run:           dovetail train {folder / 'config.yaml'}")


def _answers(folder: Path, step: int) -> list[dict[str, Any]]:
    lines = (folder / "validation" / f"step_{step}.jsonl").read_text().splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda row: row["uid"])


def _accuracy(rows: list[dict[str, Any]]) -> float:
    return sum(row["values"].get("acc", row["values"]["reward"]) for row in rows) / len(rows)


def _said(row: dict[str, Any]) -> str:
    """The answer; of an agent, its last turns and what it was told in between."""
    if "messages" not in row:
        return row["response"]
    return " -> ".join(message["content"] for message in row["messages"][1 - 2 * row["num_turns"] :])


def _short(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
