"""Prepare prompts: generate a task without any download, or convert a published data set.

dovetail data addition --out data/addition --levels 2 3 --train 2000 --test 200
dovetail data addition --out data/pairs --pairs          (for dovetail dpo and dovetail reward)
dovetail data gsm8k --out data/gsm8k                     (from the hub; math, too)
dovetail data gsm8k raw/gsm8k --out data/gsm8k           (from files on this machine)
dovetail data jsonl mine.jsonl --out data/mine --data-source exact --answer-field label
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dovetail.cli.option_types import number, output_folder, whole_number

GENERATED = ("addition", "multiplication", "arithmetic", "countdown", "letters", "sorting", "reversal")
CONVERTED = ("gsm8k", "math", "jsonl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to make, and where."""
    parser.add_argument("kind", choices=(*GENERATED, *CONVERTED), help="a task to generate or a data set to convert")
    parser.add_argument("source", nargs="?", help="file or folder with the raw data (gsm8k, math: or from the hub)")
    parser.add_argument("--out", type=output_folder, required=True, help="folder for train and test files")
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet", help="kind of files")
    parser.add_argument("--seed", type=int, default=0, help="seed of generated problems and of a split")
    parser.add_argument("--system", help="system message of every prompt")
    generated = parser.add_argument_group("generated tasks")
    generated.add_argument(
        "--levels",
        type=whole_number(),
        nargs="+",
        help="difficulty, 1 is the easiest (default: the easiest with enough different problems)",
    )
    generated.add_argument("--train", type=whole_number(), default=1000, help="number of training problems")
    generated.add_argument(
        "--test", type=whole_number(0), default=200, help="number of test problems, none of them in training"
    )
    generated.add_argument("--pairs", action="store_true", help="also a right and a wrong answer to each problem")
    converted = parser.add_argument_group("data sets")
    converted.add_argument("--instruction", help="text after each question; '' for none")
    converted.add_argument(
        "--max-calculations",
        type=whole_number(),
        metavar="N",
        help="gsm8k: leave out training problems with more calculations in their solution",
    )
    converted.add_argument("--splits", nargs="+", default=["train", "test"], help="splits to convert")
    converted.add_argument("--data-source", default="exact", help="jsonl: name that selects the reward rule")
    converted.add_argument("--question-field", default="question", help="jsonl: field of the question")
    converted.add_argument("--answer-field", default="answer", help="jsonl: field of the ground truth")
    converted.add_argument(
        "--test-share", type=number(0, 1), default=0.1, help="jsonl: share of rows set aside for testing"
    )


def run(args: argparse.Namespace) -> int:
    """Write the files and say what they hold. Exit code 2: the data cannot be used."""
    _write(args, _generate(args) if args.kind in GENERATED else _convert(args))
    return 0


def _generate(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    from dovetail.demo.tasks import easiest_level, generate_task, with_pairs

    levels = args.levels
    if levels is None:
        levels = [easiest_level(args.kind, args.train + args.test, args.seed)]
        sys.stdout.write(f"--levels {levels[0]}: the easiest with so many different problems\n")
    split = generate_task(
        args.kind, num_train=args.train, num_test=args.test, levels=levels, seed=args.seed, system=args.system
    )
    splits = {"train": split.train, "test": split.test}
    return {name: with_pairs(rows, args.seed) for name, rows in splits.items()} if args.pairs else splits


def _convert(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    from dovetail.data import prepare
    from dovetail.data.errors import DataError

    if args.kind == "jsonl":
        return _convert_jsonl(args)
    made = {}
    for split in args.splits:
        if made and args.source is not None and not prepare.has_splits(args.source):
            raise DataError(
                f"{args.source} would be {' and '.join(args.splits)} alike; say which split it is (--splits {split}), "
                "or give a folder with a file for each."
            )
        source = prepare.GSM8K_SOURCE if args.kind == "gsm8k" else prepare.MATH_SOURCE
        raw = prepare.published_rows(source, args.source, split)
        options = {"system": args.system} | ({} if args.instruction is None else {"instruction": args.instruction})
        if args.kind == "gsm8k":
            most = args.max_calculations if split == "train" else None
            made[split] = prepare.gsm8k_rows(raw, split, max_calculations=most, **options)
        else:
            from dovetail.rewards.rules.extract import last_boxed

            made[split] = prepare.math_rows(raw, split, last_boxed, **options)
    return made


def _convert_jsonl(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    import random

    from dovetail.data.errors import DataError
    from dovetail.data.prepare import all_rows, question_rows, usable_rows

    if args.source is None:
        raise DataError("jsonl needs a file: dovetail data jsonl mine.jsonl --out data/mine.")
    raw = usable_rows(all_rows(args.source, "train"), args.question_field, args.answer_field)
    random.Random(args.seed).shuffle(raw)
    num_test = round(len(raw) * args.test_share)
    parts = {"test": raw[:num_test], "train": raw[num_test:]}
    return {
        split: question_rows(
            rows,
            split,
            data_source=args.data_source,
            question_field=args.question_field,
            answer_field=args.answer_field,
            instruction=args.instruction or "",
            system=args.system,
        )
        for split, rows in parts.items()
        if rows
    }


def _write(args: argparse.Namespace, splits: dict[str, list[dict[str, Any]]]) -> None:
    from dovetail.data.files import write_rows

    for split, rows in splits.items():
        if not rows:
            continue
        file = write_rows(rows, args.out / f"{split}.{args.format}")
        question, truth = rows[0]["prompt"][-1]["content"], rows[0]["reward_model"]["ground_truth"]
        sys.stdout.write(f"{file}: {len(rows)} prompts, the first: {question!r} -> {truth!r}\n")
