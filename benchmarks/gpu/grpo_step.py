"""Whole GRPO steps of workload W on one GPU: dovetail, TRL + vLLM and a plain loop, in turn, in one call.

64 prompts x 8 answers of 512 forced tokens, 1.5B shape with random weights, one optimizer step per batch, no KL. Every
side runs in a process of its own and reports the seconds of each step; the first, which warms up, is left out.

    python -m benchmarks.gpu.grpo_step                       # every side whose package is installed
    python -m benchmarks.gpu.grpo_step dovetail trl --steps 4
    python -m benchmarks.gpu.grpo_step --first-step          # where the seconds to the end of the first step go
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.workload import PROMPTS, RESPONSE, SAMPLES, capture_trl_graphs, prepare_trl, write_workload

SIDES = {
    "dovetail": (),
    "dovetail-ray": ("ray",),
    "dovetail-exact": (),
    "dovetail-fp8": (),
    "dovetail-vllm": ("vllm",),
    "dovetail-vllm-async": ("ray", "vllm"),
    "trl": ("trl", "vllm"),
    "plain": (),
}
COMPILER_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
ENGINE_MEMORY = 0.4  # Share of the device that the rollout engine of either program may take.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sides", nargs="*", metavar="SIDE", help=f"which of {', '.join(SIDES)} (default: all there are)"
    )
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--steps", type=int, default=4, help="steps per side, the first of which warms up")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dovetail-workload"))
    parser.add_argument("--trl-micro-batch", type=int, default=32)
    parser.add_argument(
        "--trl-liger", action=argparse.BooleanOptionalAction, default=True, help="Liger's kernels in TRL's layers"
    )
    parser.add_argument(
        "--first-step",
        action="store_true",
        help="dovetail alone: the phases up to the end of step 1, with empty compiler caches and with those it left",
    )
    parser.add_argument("--set", nargs="*", default=[], help="more keys of dovetail's sides")
    parser.add_argument("--run", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := sorted(set(args.sides) - set(SIDES)):
        parser.error(f"unknown side {', '.join(unknown)}; choose from {', '.join(SIDES)}")
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: the first step warms up and is left out, so there must be two")
    if args.first_step and args.sides:
        parser.error(f"--first-step measures dovetail alone; leave {' '.join(args.sides)} out")
    if args.run:
        found = run_side(args.run, args.folder, args)
        (args.folder / f"{args.run}.json").write_text(json.dumps(found))
        return
    folder = args.folder / args.shape
    if not (folder / "model" / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_workload(folder, args.shape, steps=args.steps)
    if args.first_step:
        print(first_step_table(measure_first_steps(folder, args)))
        return
    print(table([measure(side, folder, args) for side in args.sides or SIDES]))


def run_side(side: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    if side == "trl":
        return run_trl(folder, args.steps, micro_batch=args.trl_micro_batch, liger=args.trl_liger)
    if side == "plain":
        return run_plain(folder, args.steps)
    return run_dovetail(
        folder,
        args.steps,
        engine="vllm" if "vllm" in side else "native",
        mode="async" if side.endswith("async") else "sync",
        use_ray="ray" in SIDES[side],
        more=[
            *{
                "dovetail-exact": ["actor_rollout_ref.rollout.exact=True"],
                "dovetail-fp8": ["actor_rollout_ref.actor.fp8_recipe=rowwise"],
            }.get(side, []),
            *args.set,
        ],
    )


def measure(side: str, folder: Path, args: argparse.Namespace, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """One side in a process of its own, so that its device memory is gone afterwards. `env` adds to its environment."""
    missing = [name for name in SIDES[side] if importlib.util.find_spec(name) is None]
    if missing:
        return {"side": side, "note": f"not run: {', '.join(missing)} is not installed"}
    result = folder / f"{side}.json"
    result.unlink(missing_ok=True)
    log = folder / f"{side}.log"
    command = [sys.executable, "-m", "benchmarks.gpu.grpo_step", "--run", side, "--folder", str(folder)]
    started = time.perf_counter()
    with log.open("w") as stream:
        for_trl = ["--trl-micro-batch", str(args.trl_micro_batch), f"--{'' if args.trl_liger else 'no-'}trl-liger"]
        command += ["--steps", str(args.steps), *for_trl, "--set", *args.set]
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})})
    if not result.exists():
        tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-25:])
        return {"side": side, "note": f"failed with exit code {done.returncode}; last lines of {log}:\n{tail}"}
    found = json.loads(result.read_text())
    seconds = found["step_s"][1:]
    return {
        "side": side,
        "step_s": statistics.median(seconds),
        "all_s": [round(value, 2) for value in seconds],
        "whole_process_s": time.perf_counter() - started,
        **{name: value for name, value in found.items() if name != "step_s"},
    }


def measure_first_steps(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The same run twice: nothing compiled yet, then with the caches of the first. The model's files are read from
    memory both times."""
    with tempfile.TemporaryDirectory() as caches:
        env = {name: f"{caches}/{name}" for name in COMPILER_CACHES}
        return {name: measure("dovetail", folder, args, env) for name in ("cold", "with caches")}


def first_step_table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """A column for each run: its phases up to the end of step 1."""
    columns: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        if "step_s" not in run:
            return f"{name}: {run['note']}"
        column = columns[name] = {**run["start_s"], "start to end of step 1": run["start_and_first_step_s"]}
        column["later steps"] = run["step_s"]
    rows = dict.fromkeys(row for column in columns.values() for row in column)
    width = max(map(len, rows))
    lines = [" ".join([" " * width, *(f"{name:>12}" for name in columns)])]
    for row in rows:
        values = (column.get(row, "-") for column in columns.values())
        lines.append(" ".join([f"{row:{width}}", *(f"{_rounded(value)!s:>12}" for value in values)]))
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    base = next((row["step_s"] for row in rows if row["side"] == "trl" and "step_s" in row), None)
    lines = [f"{'side':19} {'step (s)':>9} {'tokens/s':>9} {'over TRL':>9} {'peak GiB':>9}  parts"]
    for row in rows:
        if "step_s" not in row:
            lines.append(f"{row['side']:19} {row['note']}")
            continue
        rate = PROMPTS * SAMPLES * (RESPONSE + 120) / row["step_s"]
        ratio = f"{base / row['step_s']:.2f}x" if base else "-"
        parts = {name: value for name, value in row.items() if name.endswith(("_s", "_diff")) and name != "step_s"}
        shown = ", ".join(f"{name} {_rounded(value)}" for name, value in parts.items())
        lines.append(
            f"{row['side']:19} {row['step_s']:9.2f} {rate:9.0f} {ratio:>9} {row.get('peak_gib', 0):9.1f}  {shown}"
        )
    return "\n".join(lines)


def _rounded(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value


class StepClock:
    """A console that only notes when steps end."""

    def __init__(self) -> None:
        self.created = time.perf_counter()
        self.ends = [self.created]
        self.metrics: list[dict[str, float]] = []

    def phase(self, name: str | None) -> None: ...

    def progress(self, done: int, total: int, tokens: int, unit: str = "answers") -> None: ...

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 0:  # What is reported before the first step: set-up is over.
            self.ends = [time.perf_counter()]
            return
        self.ends.append(time.perf_counter())
        self.metrics.append(dict(metrics))
        print(f"step {step} is over", flush=True)

    def event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...

    def step_seconds(self) -> list[float]:
        return [end - start for start, end in itertools.pairwise(self.ends)]


def run_dovetail(
    folder: Path, steps: int, *, engine: str, mode: str, use_ray: bool, more: Sequence[str]
) -> dict[str, Any]:
    """The trainer itself: data, generation, rewards, advantages, update, run folder. One process unless `use_ray`."""
    from dovetail.config import load_config
    from dovetail.observability.run_folder import TIMELINE, read_json_lines
    from dovetail.trainer.run import run_training

    logging.basicConfig(level=logging.INFO)
    policy = "actor_rollout_ref"
    config = load_config(
        overrides=[
            f"data.train_files={folder}/prompts.jsonl",
            f"data.train_batch_size={PROMPTS}",
            "data.max_prompt_length=128",
            f"data.max_response_length={RESPONSE}",
            f"{policy}.model.path={folder}/model",
            f"{policy}.model.use_fused_kernels=True",
            f"{policy}.model.enable_gradient_checkpointing=False",
            f"{policy}.rollout.name={engine}",
            f"{policy}.rollout.mode={mode}",
            f"{policy}.rollout.n={SAMPLES}",
            f"{policy}.rollout.ignore_eos=True",
            f"{policy}.rollout.max_num_seqs={PROMPTS * SAMPLES}",
            f"{policy}.rollout.max_num_batched_tokens=65536",
            f"{policy}.rollout.gpu_memory_utilization={ENGINE_MEMORY}",
            f"{policy}.actor.ppo_mini_batch_size={PROMPTS}",
            f"{policy}.actor.use_dynamic_bsz=True",
            f"{policy}.actor.ppo_max_token_len_per_gpu=20480",
            f"{policy}.actor.optim.lr=1e-6",
            "algorithm.adv_estimator=grpo",
            f"custom_reward_function.path={folder}/reward.py",
            "custom_reward_function.name=compute_score",
            "reward_model.num_workers=8",
            "trainer.device=cuda",
            "trainer.n_gpus_per_node=1",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=-1",
            f"trainer.default_local_dir={folder}/run-{engine}-{mode}-{os.getpid()}",
            "trainer.resume_mode=disable",
            *more,
        ]
    ).config
    clock = StepClock()
    run = run_training(config, use_ray=use_ray, console=lambda title, total: clock)
    # Where the time to the end of the first step goes: the phases before it, and its own.
    (started,) = (row for row in read_json_lines(run.folder / TIMELINE) if row["step"] == 0)
    first = {f"{who}: {phase}": round(end - start, 1) for who, phase, start, end, _ in started["spans"]}
    first |= {name: round(value, 1) for name, value in clock.metrics[0].items() if name.startswith("timing_s/")}
    parts: dict[str, Any] = {"start_s": first}
    for name in ("timing_s/gen", "timing_s/update_actor", "timing_s/reward", "timing_s/adv"):
        values = [metrics[name] for metrics in clock.metrics[1:] if name in metrics]
        if values:
            parts[name.removeprefix("timing_s/") + "_s"] = statistics.median(values)
    return {
        "step_s": clock.step_seconds(),
        **parts,
        "start_and_first_step_s": clock.ends[1] - clock.created,
        "peak_gib": clock.metrics[-1]["memory/peak_allocated_gib"],  # torch's own counter is set back at every phase
        "probs_diff": [metrics.get("rollout_corr/probs_diff_mean") for metrics in clock.metrics],
        "mfu": {name: value for name, value in clock.metrics[-1].items() if "mfu" in name},
    }


def run_trl(
    folder: Path,
    steps: int,
    *,
    prompts: int = PROMPTS,
    response: int = RESPONSE,
    micro_batch: int,
    liger: bool = True,
    lengths: Sequence[int] | None = None,
) -> dict[str, Any]:
    """TRL's GRPO trainer with vLLM in the same process, at the fastest settings found for W on an H200.

    Seconds a step there, without gradient checkpointing: Liger's kernels and micro-batches of 32 16.7; plain layers and
    micro-batches of 16 23.5. Two more settings save it work that dovetail does not do either: vLLM does not write the
    text of every token, as TRL decodes the ids itself, and without a correction of vLLM's log-probs there is no second
    forward. `lengths` are forced on the prompts in turn, in tokens.
    """
    prepare_trl()
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    capture_trl_graphs(prompts * SAMPLES)
    ends: list[float] = [time.perf_counter()]

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            ends.append(time.perf_counter())
            print(f"step {len(ends) - 1} is over", flush=True)

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(len(str(text)) % 7) for text in completions]

    texts = (folder / "prompts.txt").read_text().splitlines()
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        num_generations=SAMPLES,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=prompts * SAMPLES // micro_batch,
        max_completion_length=response,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        bf16=True,
        gradient_checkpointing=False,
        use_liger_kernel=liger,
        ddp_find_unused_parameters=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=ENGINE_MEMORY,
        vllm_max_model_length=max(1024, 128 + response),
        vllm_importance_sampling_correction=False,
        generation_kwargs={"ignore_eos": True, "detokenize": False},
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        callbacks=[Clock()],
    )
    if lengths is not None:
        _force_lengths(trainer.vllm_generation.llm, lengths)
    trainer.train()
    seconds = [end - start for start, end in itertools.pairwise(ends)]
    return {"step_s": seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def _force_lengths(llm: Any, lengths: Sequence[int]) -> None:
    """vLLM takes sampling settings per request; TRL has no option for it. Neighbours are the samples of one prompt."""
    plain, left = llm.generate, itertools.cycle(lengths)

    def generate(prompts: list[Any], sampling_params: Any, **options: Any) -> Any:
        each = []
        for _ in range(0, len(prompts), SAMPLES):
            own = sampling_params.clone()
            own.max_tokens = next(left)
            each += [own] * SAMPLES
        return plain(prompts, sampling_params=each, **options)

    llm.generate = generate


def run_plain(folder: Path, steps: int) -> dict[str, Any]:
    """What one writes first: `generate`, then padded micro-batches of 8 with full logits and gradient checkpointing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).cuda()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    texts = (folder / "prompts.txt").read_text().splitlines()
    seconds, generated = [], []
    for step in range(steps):
        started = time.perf_counter()
        chosen = texts[step * PROMPTS : (step + 1) * PROMPTS]
        inputs = tokenizer(chosen, return_tensors="pt", padding=True).to("cuda")
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            ids = model.generate(
                **inputs,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=RESPONSE,
                min_new_tokens=RESPONSE,
                num_return_sequences=SAMPLES,
                pad_token_id=tokenizer.pad_token_id,
            )
        torch.cuda.synchronize()
        generated.append(time.perf_counter() - started)
        answers = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :])
        scores = torch.tensor([float(len(text) % 7) for text in answers], device="cuda").view(PROMPTS, SAMPLES)
        advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).flatten()
        model.train()
        for rows in torch.arange(len(ids), device="cuda").split(8):
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(ids[rows]).logits[:, -RESPONSE - 1 : -1].float()
            labels = ids[rows][:, -RESPONSE:]
            log_probs = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
            ratio = (log_probs - log_probs.detach()).exp()
            loss = -(ratio * advantages[rows].unsqueeze(-1)).sum() / (len(ids) * RESPONSE)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {
        "step_s": seconds,
        "gen_s": statistics.median(generated[1:]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


if __name__ == "__main__":
    main()
