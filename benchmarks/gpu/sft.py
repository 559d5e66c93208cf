"""Fine-tuning on GSM8K's solutions on one GPU: tokens per second of `dovetail sft` and of TRL's SFTTrainer.

The same conversations, batch (128 an optimizer step), dtype and optimizer on both sides, the loss on the assistant's
tokens. TRL runs at each of `--trl-micro-batches`, with conversations of similar length side by side; its fastest
counts. (It packs without padding only where flash-attn is installed; then it is tried, too.)

    python -m benchmarks.gpu.sft MODEL_FOLDER RAW_GSM8K_FOLDER --steps 25
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.grpo_step import StepClock

BATCH, LEARNING_RATE = 128, 1e-5
_FIRST = 5  # steps that compile and warm up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("data", type=Path, help="folder with GSM8K's train.jsonl")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--sides", nargs="+", choices=("dovetail", "trl"), default=["dovetail", "trl"])
    parser.add_argument("--trl-micro-batches", nargs="+", type=int, default=[32, 64, 128])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dovetail-sft"))
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.run:
        result = run_dovetail(args) if args.run == "dovetail" else run_trl(args, *args.run.split(":")[1:])
        (args.folder / "result.json").write_text(json.dumps(result))
        return
    tokens, weights = write_conversations(args), num_weights(args.model)
    print(f"{tokens:.1f} tokens a conversation, {weights / 1e6:.0f} M weights")
    packed = ["packed"] if importlib.util.find_spec("flash_attn") else []
    ways = [f"trl:{size}:{how}" for size in args.trl_micro_batches for how in ("by_length", *packed)]
    for side in [name for name in ("dovetail", *ways) if name.split(":")[0] in args.sides]:
        seconds = in_process(side, args)
        if seconds is not None:
            step = statistics.median(seconds[_FIRST:])
            rate = BATCH * tokens / step
            print(
                f"{side:18} {step:6.3f} s a step (first {seconds[0]:.1f}), {BATCH / step:7.1f} conversations/s, "
                f"{rate / 1e3:6.1f} k tokens/s, {6 * weights * rate / 1e12:6.1f} TFLOP/s",
                flush=True,
            )


def in_process(side: str, args: argparse.Namespace) -> list[float] | None:
    """Seconds of each step, from a process of its own."""
    result, log = args.folder / "result.json", args.folder / f"{side.replace(':', '-')}.log"
    result.unlink(missing_ok=True)
    with log.open("w") as stream:
        command = [sys.executable, "-m", "benchmarks.gpu.sft", *sys.argv[1:], "--run", side]
        subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT)
    if result.exists():
        return json.loads(result.read_text())
    print(f"{side} failed; last lines of {log}:", *log.read_text(errors="replace").splitlines()[-12:], sep="\n")
    return None


def write_conversations(args: argparse.Namespace) -> float:
    """`conversations.jsonl`; returns the mean number of tokens, by the model's own template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line) for line in (args.data / "train.jsonl").open()][: BATCH * args.steps]
    chats = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in rows
    ]
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (args.folder / "conversations.jsonl").write_text("\n".join(lines) + "\n")
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    return statistics.fmean(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))


def num_weights(model: Path) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).num_parameters()


def run_dovetail(args: argparse.Namespace) -> list[float]:
    from dovetail.config import load_config
    from dovetail.trainer.run import run_training

    policy = "actor_rollout_ref"
    config = load_config(
        overrides=[
            "trainer.method=sft",
            f"data.train_files={args.folder}/conversations.jsonl",
            f"data.train_batch_size={BATCH}",
            "data.max_length=1024",
            f"{policy}.model.path={args.model}",
            f"{policy}.model.use_fused_kernels=True",
            f"{policy}.model.enable_gradient_checkpointing=False",
            f"{policy}.actor.use_dynamic_bsz=True",
            f"{policy}.actor.ppo_max_token_len_per_gpu=32768",
            f"{policy}.actor.optim.lr={LEARNING_RATE}",
            f"trainer.device={args.device}",
            "trainer.n_gpus_per_node=1",
            f"trainer.total_training_steps={args.steps}",
            "trainer.total_epochs=1",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
            f"trainer.default_local_dir={args.folder}/run",
            "trainer.resume_mode=disable",
            *([f"{policy}.actor.fsdp_config.mixed_precision.param_dtype=float32"] if args.device == "cpu" else []),
        ]
    ).config
    clock = StepClock()
    run_training(config, use_ray=False, console=lambda title, total: clock)
    return clock.step_seconds()


def run_trl(args: argparse.Namespace, micro_batch: str, how: str) -> list[float]:
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *unused: Any, **also_unused: Any) -> None:
            if not ends:
                ends.append(time.perf_counter())

        def on_step_end(self, *unused: Any, **also_unused: Any) -> None:
            if args.device == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    size = int(micro_batch)
    config = SFTConfig(
        output_dir=str(args.folder / "trl"),
        max_steps=args.steps,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=BATCH // size,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_length=1024,
        bf16=args.device == "cuda",
        use_cpu=args.device == "cpu",
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        packing=how == "packed",
        logging_steps=args.steps,
        save_strategy="no",
        report_to=[],
        dataloader_num_workers=4 if args.device == "cuda" else 0,
        model_init_kwargs={"dtype": "float32"},  # as on the other side: float32 weights, products in bfloat16
        **({"train_sampling_strategy": "group_by_length"} if how == "by_length" else {}),
    )
    rows = load_dataset("json", data_files=f"{args.folder}/conversations.jsonl", split="train")
    SFTTrainer(model=str(args.model), args=config, train_dataset=rows, callbacks=[Clock()]).train()
    return [end - start for start, end in itertools.pairwise(ends)]


if __name__ == "__main__":
    main()
