"""How well asynchronous training learns: GRPO on addition, on one CPU thread, each mode with and without a correction.

A model of 0.1 million parameters adds 2 to 6 digits and writes every subtotal (`3+4+5=` -> `7,12`), so the lengths of
its responses have a long tail. A supervised phase teaches it the sums, and then to stop after any of the subtotals, so
that it has some of the problems right. It is made once, in `--folder`, and every run starts from it. Sides:

    sync            generate, then train
    one_step_off    the next batch is generated while this one trains: by a process of its own, which needs Ray
    fully_async-S   partial rollouts on the trainer's own device, at most S updates old; as many groups in flight as
                    that admits

Each asynchronous one runs with three corrections: `none` (stale responses are trained on as if they were fresh), `clip`
(the default: the ratio to the policy that sampled is clipped) and `tis` (old log-probs are recomputed, and tokens have
truncated importance weights).

Task, model, batch and learning rate were chosen by runs of `sync` alone, before any asynchronous run was looked at.

    OMP_NUM_THREADS=1 python -m benchmarks.async_quality curves.jsonl [--sides sync fully_async-8/none] [--seeds 0 1]
    python -m benchmarks.async_quality curves.jsonl --draw docs/assets/async-quality.png     # runs nothing

Each run appends a line to the file, and what the file has is not run again. Accuracy is that of two sampled responses
to each of the held-out problems. The clock stands still for validation. A point has the step, seconds, seconds of
processor time of this process (which a busy machine changes less), and accuracy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dovetail.config import load_config
from dovetail.config.root import DovetailConfig
from dovetail.data.files import prompt_row, write_rows

MOST_ADDENDS, PROMPT, RESPONSE = 6, 12, 20
PROMPTS, SAMPLES = 16, 8
STEPS, EVERY, GOAL = 30, 5, 0.4
LEARNING_RATE = 1e-3
SUPERVISED_STEPS, CUT_STEPS, CUT = 350, 60, 0.7
"""The last `CUT_STEPS` of the supervised phase cut this share of the responses short."""
NUM_SUPERVISED, NUM_TRAIN, NUM_TEST = 8192, 1024, 256
BOUNDS = (1, 4, 8)
CORRECTIONS = {
    "none": ["async_training.prox=recompute"],
    "clip": [],
    "tis": ["async_training.prox=recompute", "algorithm.rollout_correction.rollout_is=token"],
}
MODES = {
    "one_step_off": [
        "async_training.mode=one_step_off",
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
    ],
    **{
        f"fully_async-{bound}": [
            "async_training.mode=fully_async",
            f"async_training.max_staleness={bound}",
            f"async_training.max_in_flight={(1 + bound) * PROMPTS}",
        ]
        for bound in BOUNDS
    },
}
SIDES: dict[str, list[str]] = {"sync": []} | {
    f"{mode}/{correction}": [*keys, *more] for mode, keys in MODES.items() for correction, more in CORRECTIONS.items()
}
ACCURACY = "val-core/dovetail/addition/acc/mean@2"


# ---- the task and the model ----


def draw_problem(rng: random.Random) -> list[int]:
    count = min(MOST_ADDENDS, 2 + int(rng.expovariate(1 / 2)))
    return [rng.randint(1, 5) for _ in range(count)]


def question(addends: Sequence[int]) -> str:
    return "+".join(map(str, addends)) + "="


def worked(addends: Sequence[int]) -> list[str]:
    """The subtotals."""
    return [str(total) for total in itertools.accumulate(addends)][1:]


def write_workload(folder: Path, supervised_steps: int) -> None:
    """`train.parquet`, `test.parquet` and `model`. What is trained on, here or there, is no problem of the test."""
    rng = random.Random(0)
    test = {question(addends): addends for addends in (draw_problem(rng) for _ in range(NUM_TEST))}
    drawn = [draw_problem(rng) for _ in range(NUM_SUPERVISED)]
    train = [addends for addends in drawn if question(addends) not in test]
    rows = [
        prompt_row(
            data_source="dovetail/addition",
            question=question(addends),
            ground_truth=str(sum(addends)),
            ability="math",
            extra_info={"index": index},
        )
        for index, addends in enumerate([*test.values(), *train[:NUM_TRAIN]])
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(rows[: len(test)], folder / "test.parquet")
    write_rows(rows[len(test) :], folder / "train.parquet")
    save_model(folder / "model", train, supervised_steps)


def save_tokenizer(folder: Path) -> Any:
    """A token for each character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789+=,"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_model(folder: Path, problems: Sequence[Sequence[int]], steps: int) -> None:
    """Supervised from the start, on batches of 64 worked problems of similar length."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer, rng = save_tokenizer(folder), random.Random(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=128,
            initializer_range=0.08,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    batches: list[list[Sequence[int]]] = []
    for step in range(steps):
        if not batches:
            drawn = sorted(rng.choices(problems, k=256), key=len)
            batches = [drawn[start : start + 64] for start in range(0, 256, 64)]
            rng.shuffle(batches)
        batch = batches.pop()
        texts = [worked(addends) for addends in batch]
        if step >= steps - CUT_STEPS:
            texts = [text[: rng.randint(1, len(text))] if rng.random() < CUT else text for text in texts]
        rows = [
            tokenizer(question(addends) + ",".join(text))["input_ids"] + [1]
            for addends, text in zip(batch, texts, strict=True)
        ]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        labels = tokens.masked_fill(tokens == 0, -100)
        for row, addends in zip(labels, batch, strict=True):
            row[: 2 * len(addends)] = -100  # the question
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 50)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)


# ---- a run ----


class Clock:
    """A console that notes accuracy, staleness and seconds; validation is left out of the seconds."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float, float, float]] = []
        self.metrics: list[dict[str, float]] = []
        self._wall = self._testing = 0.0
        self._testing_since: float | None = None
        self._start = time.process_time()

    def phase(self, name: str | None) -> None:
        if name == "testing" and self._testing_since is None:
            self._testing_since = time.process_time()
        elif name is None and self._testing_since is not None:
            self._testing += time.process_time() - self._testing_since
            self._testing_since = None

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 0:
            self._start, self._testing = time.process_time(), 0.0
        else:
            self._wall += metrics["timing_s/step"]
            self.metrics.append(dict(metrics))
        if ACCURACY in metrics:
            cpu = time.process_time() - self._start - self._testing
            self.points.append((step, round(self._wall, 2), round(cpu, 2), metrics[ACCURACY]))

    def progress(self, done: int, total: int, tokens: int, unit: str = "answers") -> None: ...

    def event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def make_config(side: str, seed: int, folder: Path, run: Path, steps: int, more: Sequence[str] = ()) -> DovetailConfig:
    policy = "actor_rollout_ref"
    return load_config(
        overrides=[
            f"data.train_files={folder}/train.parquet",
            f"data.val_files={folder}/test.parquet",
            f"data.train_batch_size={PROMPTS}",
            f"data.max_prompt_length={PROMPT}",
            f"data.max_response_length={RESPONSE}",
            f"{policy}.model.path={folder}/model",
            f"{policy}.model.enable_gradient_checkpointing=False",
            f"{policy}.actor.ppo_mini_batch_size={PROMPTS}",
            f"{policy}.actor.use_dynamic_bsz=True",
            f"{policy}.actor.ppo_max_token_len_per_gpu=4096",
            f"{policy}.actor.optim.lr={LEARNING_RATE}",
            f"{policy}.actor.fsdp_config.mixed_precision.param_dtype=float32",
            f"{policy}.rollout.dtype=float32",
            f"{policy}.rollout.n={SAMPLES}",
            f"{policy}.rollout.val_kwargs.n=2",
            f"{policy}.rollout.val_kwargs.do_sample=True",
            f"{policy}.rollout.val_kwargs.temperature=1.0",
            f"{policy}.rollout.max_num_seqs={(1 + max(BOUNDS)) * PROMPTS * SAMPLES}",
            "algorithm.adv_estimator=grpo",
            "reward_model.num_workers=1",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=1",
            f"trainer.seed={seed}",
            f"trainer.total_training_steps={steps}",
            f"trainer.test_freq={EVERY}",
            "trainer.save_freq=-1",
            "trainer.logger=[console,file]",
            f"trainer.default_local_dir={run}",
            "trainer.resume_mode=disable",
            *SIDES[side],
            *more,
        ]
    ).config


def run_side(side: str, seed: int, folder: Path, steps: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """One line of the file. Whether engines and trainer are apart decides whether Ray is needed."""
    from dovetail.trainer.run import run_training

    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="dovetail-quality-") as run:
        config = make_config(side, seed, folder, Path(run), steps, more)
        run_training(config, use_ray=not config.actor_rollout_ref.hybrid_engine, console=lambda title, total: clock)
    late = clock.metrics[len(clock.metrics) // 2 :]  # the buffer is full by then
    lags = [sum(lag * m.get(f"async/staleness/lag_{lag}", 0.0) for lag in range(max(BOUNDS) + 1)) for m in late]
    return {
        "side": side,
        "seed": seed,
        "points": clock.points,
        "staleness": round(statistics.fmean(m.get("async/staleness/mean", 0.0) for m in late), 2),
        "token_lag": round(statistics.fmean(lags), 2),
        "reward": [round(m["critic/score/mean"], 3) for m in clock.metrics],
    }


# ---- what they show ----


def first_at(points: Iterable[Sequence[float]], goal: float) -> Sequence[float] | None:
    return next((point for point in points if point[-1] >= goal), None)


def by_side(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    lines = list(lines)
    return {side: runs for side in SIDES if (runs := [line for line in lines if line["side"] == side])}


def table(lines: Iterable[Mapping[str, Any]], goal: float) -> str:
    """A row for each side, as Markdown. The best accuracy is beside the last one: a run may fall back."""
    rows = [
        f"| side | runs | oldest token (updates), all tokens | last accuracy, mean (lowest to highest) | best, mean "
        f"| steps to {goal:.0%} | CPU s to {goal:.0%} |",
        "|---|---|---|---|---|---|---|",
    ]
    for side, runs in by_side(lines).items():
        last = [run["points"][-1][-1] for run in runs]
        best = [max(point[-1] for point in run["points"]) for run in runs]
        reached = [first_at(run["points"], goal) for run in runs]
        steps, seconds = (
            ", ".join("never" if point is None else f"{point[index]:.0f}" for point in reached) for index in (0, 2)
        )
        old, lag = (statistics.fmean(run[name] for run in runs) for name in ("staleness", "token_lag"))
        rows.append(
            f"| `{side}` | {len(runs)} | {old:.1f}, {lag:.1f} | {statistics.fmean(last):.1%} ({min(last):.1%} to "
            f"{max(last):.1%}) | {statistics.fmean(best):.1%} | {steps} | {seconds if in_one_process(side) else '-'} |"
        )
    return "\n".join(rows)


def in_one_process(side: str) -> bool:
    return not side.startswith("one_step_off")


def draw(lines: Iterable[Mapping[str, Any]], file: Path) -> None:
    """A column for each mode: accuracy against steps above, against processor time below. Bands are all seeds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from dovetail.dashboard.report import COLOURS, STYLE

    runs = by_side(lines)
    with rc_context(STYLE):
        figure = Figure(figsize=(3.4 * len(MODES), 5.4), dpi=110, layout="constrained")
        grid = figure.subplots(2, len(MODES), sharey=True)
        for column, mode in enumerate(MODES):
            sides = {"sync": "#5f6b7a"} | dict(
                zip((f"{mode}/{name}" for name in CORRECTIONS), COLOURS[1:], strict=False)
            )
            for row, index in enumerate((0, 2)):
                axes = grid[row][column]
                axes.set_title(mode if row == 0 else "", loc="left", fontsize=10, fontweight="bold")
                axes.set_xlabel(("step", "", "CPU seconds")[index], fontsize=8, color="#5f6b7a")
                axes.tick_params(labelsize=8, colors="#5f6b7a", length=0)
                for side, colour in sides.items():
                    if side not in runs or (index and not in_one_process(side)):
                        continue
                    curves = [run["points"] for run in runs[side]]
                    xs, ys = ([[point[i] for point in curve] for curve in curves] for i in (index, -1))
                    x = [statistics.fmean(at) for at in zip(*xs, strict=True)]
                    y = list(zip(*ys, strict=True))
                    axes.plot(x, [statistics.fmean(at) for at in y], color=colour, label=side.rpartition("/")[2])
                    axes.fill_between(x, [min(at) for at in y], [max(at) for at in y], color=colour, alpha=0.12, lw=0)
                axes.legend(fontsize=7, frameon=False, loc="lower left")
        figure.suptitle("held-out accuracy", fontsize=13, fontweight="bold", x=0.01, ha="left")
        figure.savefig(file, format="png")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file of the curves, a line for each run; what it has is not run again")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES), metavar="SIDE")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--goal", type=float, default=GOAL, help="accuracy whose steps and seconds the table has")
    parser.add_argument(
        "--supervised-steps", type=int, default=SUPERVISED_STEPS, help="of the model that runs start from"
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dovetail-quality"), help="model and problems")
    parser.add_argument("--draw", type=Path, help="write the picture of what the file has, and run nothing")
    parser.add_argument("--set", nargs="*", default=[], help="more keys")
    args = parser.parse_args(argv)
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if args.draw:
        draw(lines, args.draw)
    else:
        torch.set_num_threads(1)
        if not (args.folder / "model" / "config.json").exists():
            write_workload(args.folder, args.supervised_steps)
        known = {(line["side"], line["seed"]) for line in lines}
        for seed, side in itertools.product(args.seeds, args.sides):
            if (side, seed) in known:
                continue
            line = run_side(side, seed, args.folder, args.steps, args.set)
            if line["points"][-1][0] != args.steps:
                raise SystemExit(f"{side}, seed {seed}, was stopped at step {line['points'][-1][0]}; it is not kept.")
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            lines.append(line)
            print(json.dumps(line), flush=True)
    print(table(lines, args.goal))


if __name__ == "__main__":
    main()
