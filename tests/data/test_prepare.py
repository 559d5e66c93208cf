"""Generated tasks and converted data sets: disjoint, repeatable, and scored right by the rule they name."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.data import GENERATED
from dovetail.cli.main import main
from dovetail.data.errors import DataError
from dovetail.data.files import read_rows, write_rows
from dovetail.data.prepare import GSM8K_INSTRUCTION, GSM8K_SOURCE, MATH_SOURCE, gsm8k_rows, math_rows
from dovetail.demo.tasks import TASKS, generate_task, with_pairs
from dovetail.rewards.registry import default_compute_score, has_rule
from dovetail.rewards.rules.extract import last_boxed
from tests.hub import put_in_cache, serve_hub

pytestmark = pytest.mark.unit


def question(row: dict[str, Any]) -> str:
    return row["prompt"][-1]["content"]


@pytest.mark.parametrize("name", list(TASKS))
def test_train_and_test_share_no_problem_and_repeat_none(name: str) -> None:
    split = generate_task(name, num_train=60, num_test=20, levels=[2, 3], seed=1)
    questions = [question(row) for row in split.train + split.test]
    assert (len(split.train), len(split.test)) == (60, 20)
    assert len(set(questions)) == 80
    assert {row["extra_info"]["level"] for row in split.test} == {2, 3}


def test_the_same_sum_in_another_order_counts_as_the_same_problem() -> None:
    split = generate_task("addition", num_train=40, num_test=15, levels=[1])
    sums = [tuple(sorted(question(row).split("?")[0].split()[2:5:2])) for row in split.train + split.test]
    assert len(set(sums)) == 55


@pytest.mark.parametrize("name", list(TASKS))
def test_a_seed_gives_the_same_problems_and_another_one_others(name: str) -> None:
    def made(seed: int) -> list[str]:
        return [question(row) for row in generate_task(name, num_train=20, num_test=5, levels=[2], seed=seed).train]

    assert made(3) == made(3) != made(4)


@pytest.mark.parametrize("name", [name for name in TASKS if name != "countdown"])
def test_the_truth_itself_is_scored_as_right_and_something_else_as_wrong(name: str) -> None:
    for level in range(1, len(TASKS[name].levels) + 1):
        row = generate_task(name, num_train=1, num_test=0, levels=[level]).train[0]
        truth = row["reward_model"]["ground_truth"]
        answer = truth if name == "reversal" else f"The answer is: {truth}"
        assert default_compute_score(row["data_source"], answer, truth)["score"] == 1.0
        assert default_compute_score(row["data_source"], "no", truth)["score"] == 0.0


def test_expressions_are_worth_what_their_truth_says() -> None:
    for row in generate_task("arithmetic", num_train=100, num_test=0, levels=[1, 2, 3, 4]).train:
        expression = question(row).removeprefix("What is ").split("?")[0]
        assert str(eval(expression)) == row["reward_model"]["ground_truth"], expression


def test_pairs_are_the_truth_and_another_problems_truth() -> None:
    rows = generate_task("addition", num_train=50, num_test=0, levels=[2]).train
    paired = with_pairs(rows)
    truths = {row["reward_model"]["ground_truth"] for row in rows}
    for before, row in zip(rows, paired, strict=True):
        assert row["chosen"] == before["reward_model"]["ground_truth"]
        assert row["rejected"] in truths - {row["chosen"]}
        assert before.items() <= row.items()
    assert with_pairs(rows) == paired
    assert with_pairs([]) == []
    with pytest.raises(DataError, match="pairs need problems with different answers"):
        with_pairs(rows[:1])
    with pytest.raises(DataError, match="pairs need answers that are text"):
        with_pairs(generate_task("countdown", num_train=2, num_test=0).train)


def test_every_countdown_has_a_solution_that_its_rule_accepts() -> None:
    for row in generate_task("countdown", num_train=30, num_test=0, levels=[1, 2]).train:
        truth = row["reward_model"]["ground_truth"]
        solution = solve([(Fraction(n), str(n)) for n in truth["numbers"]], Fraction(truth["target"]))
        assert solution is not None, truth
        assert default_compute_score(row["data_source"], f"<answer>{solution}</answer>", truth)["score"] == 1.0


def solve(values: list[tuple[Fraction, str]], target: Fraction) -> str | None:
    if len(values) == 1:
        return values[0][1] if values[0][0] == target else None
    for i, j in itertools.permutations(range(len(values)), 2):
        (a, x), (b, y) = values[i], values[j]
        rest = [value for k, value in enumerate(values) if k not in (i, j)]
        made = [(a + b, f"({x} + {y})"), (a - b, f"({x} - {y})"), (a * b, f"({x} * {y})")]
        made += [(a / b, f"({x} / {y})")] if b else []
        for value in made:
            found = solve([*rest, value], target)
            if found is not None:
                return found
    return None


def test_asking_for_more_problems_than_there_are_is_an_error() -> None:
    with pytest.raises(DataError, match=r"level 1 of addition .* hardly more than 55 different problems"):
        generate_task("addition", num_train=100, num_test=0, levels=[1])
    with pytest.raises(DataError, match="level 9 of addition does not exist; levels are 1 to 6"):
        generate_task("addition", num_train=1, num_test=0, levels=[9])


def test_the_command_knows_every_task_and_every_task_has_a_rule() -> None:
    assert set(GENERATED) == set(TASKS)
    assert all(has_rule(task.data_source) for task in TASKS.values())


def test_the_command_generates_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "letters", "--out", str(tmp_path), "--levels", "1", "2", "--train", "8", "--test", "4"]
    assert main(arguments) == 0
    assert (len(read_rows(str(tmp_path / "train.parquet"))), len(read_rows(str(tmp_path / "test.parquet")))) == (8, 4)
    assert "train.parquet: 8 prompts" in capsys.readouterr().out


@pytest.mark.parametrize("name", GENERATED)
def test_every_task_can_be_generated_without_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["data", name, "--out", str(tmp_path)]) == 0
    assert len(read_rows(str(tmp_path / "train.parquet"))) == 1000
    assert capsys.readouterr().out.startswith("--levels ")


RAW = [
    {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "A thousand and one?", "answer": "#### 1,001"},
]


def test_the_command_converts_gsm8k_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in RAW))
    (tmp_path / "test.jsonl").write_text(json.dumps(RAW[0]))
    assert main(["data", "gsm8k", str(tmp_path), "--out", str(tmp_path / "out"), "--format", "jsonl"]) == 0
    made = read_rows(str(tmp_path / "out" / "train.jsonl"))
    assert made[1]["reward_model"] == {"style": "rule", "ground_truth": "1001"}
    assert made[0]["prompt"] == [{"role": "user", "content": f"Two and two? {GSM8K_INSTRUCTION}"}]
    assert default_compute_score(made[1]["data_source"], RAW[1]["answer"], "1001")["score"] == 1.0


MATH_RAW = [{"problem": "Half?", "solution": r"So \boxed{\frac{1}{2}}.", "level": "Level 1", "type": "Algebra"}]


def published(repository: Path, kind: str) -> Path:
    """A copy of the repository of GSM8K or MATH with rows of our own: all problems, and some in another folder."""
    folder, other, rows = {"gsm8k": ("main", "socratic", RAW), "math": ("data", "algebra", MATH_RAW)}[kind]
    for split, order in (("train", 1), ("test", -1)):
        write_rows(rows[::order], repository / folder / f"{split}-00000-of-00001.parquet")
        write_rows(rows[:1], repository / other / f"{split}-00000-of-00001.parquet")
    return repository


@pytest.mark.parametrize(("kind", "name"), [("gsm8k", GSM8K_SOURCE), ("math", MATH_SOURCE)])
def test_what_the_hub_gives_is_converted_as_a_copy_of_the_repository_is(
    cache: Path, tmp_path: Path, kind: str, name: str
) -> None:
    copied = published(tmp_path / "copied", kind)
    put_in_cache(cache, name, copied, kind="dataset")
    assert main(["data", kind, "--out", str(tmp_path / "hub")]) == 0
    assert main(["data", kind, str(copied), "--out", str(tmp_path / "local")]) == 0
    for split in ("train", "test"):
        made, expected = (list(read_rows(str(tmp_path / way / f"{split}.parquet"))) for way in ("hub", "local"))
        assert made == expected
        truths = {row["reward_model"]["ground_truth"] for row in made}
        assert truths == {"gsm8k": {"4", "1001"}, "math": {r"\frac{1}{2}"}}[kind]


def test_only_the_folder_of_all_problems_is_downloaded(tmp_path: Path) -> None:
    """From a hub on loopback, in a process of its own: huggingface_hub reads its variables when it is imported."""
    files = {
        str(file.relative_to(tmp_path)): file.read_bytes() for file in published(tmp_path, "gsm8k").rglob("*.parquet")
    }
    command = [sys.executable, "-m", "dovetail.cli.main", "data", "gsm8k", "--out", str(tmp_path / "out")]
    with serve_hub({f"datasets/{GSM8K_SOURCE}": files}) as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        environment = os.environ | settings | {"HF_HUB_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert hub.count == {f"main/{split}-00000-of-00001.parquet": 1 for split in ("train", "test")}
    assert len(read_rows(str(tmp_path / "out" / "train.parquet"))) == 2


@pytest.mark.parametrize("has_another_folder", [False, True])
def test_without_the_hub_the_message_says_how_to_get_the_files(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_another_folder: bool
) -> None:
    if has_another_folder:
        write_rows(RAW, tmp_path / "some" / "socratic" / "train-00000-of-00001.parquet")
        put_in_cache(cache, GSM8K_SOURCE, tmp_path / "some", kind="dataset")
    assert main(["data", "gsm8k", "--out", str(tmp_path / "out")]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"hub cannot give {'main of ' * has_another_folder}openai/gsm8k" in message
    assert "the cache does not have" in message
    assert "`hf download openai/gsm8k --repo-type dataset --local-dir FOLDER`" in message
    assert not (tmp_path / "out").exists()


def test_the_command_splits_any_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps({"q": f"q{i}", "a": f"a{i}"}) for i in range(10)))
    fields = ["--question-field", "q", "--answer-field", "a", "--test-share", "0.2", "--instruction", "Be brief."]
    assert main(["data", "jsonl", str(file), "--out", str(tmp_path / "out"), *fields]) == 0
    train, test = read_rows(str(tmp_path / "out" / "train.parquet")), read_rows(str(tmp_path / "out" / "test.parquet"))
    assert (len(train), len(test)) == (8, 2)
    assert question(test[0]).endswith(" Be brief.")


def test_the_command_reads_a_file_on_the_hub(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "all.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n' * 3)
    put_in_cache(cache, "org/words", tmp_path / "words", kind="dataset")
    options = ["--out", str(tmp_path / "out"), "--test-share", "0"]
    assert main(["data", "jsonl", "hf://datasets/org/words/all.jsonl", *options]) == 0
    assert len(read_rows(str(tmp_path / "out" / "train.parquet"))) == 3
    assert main(["data", "jsonl", "hf://datasets/org/words/no.jsonl", *options]) == 2
    assert "the cache does not have it" in capsys.readouterr().err


def test_conversations_stay_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "2 + 2?"},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"prompt": chat, "answer": "4"}))
    options = ["--out", str(tmp_path / "out"), "--question-field", "prompt", "--test-share", "0"]
    assert main(["data", "jsonl", str(file), *options]) == 0
    (row,) = read_rows(str(tmp_path / "out" / "train.parquet"))
    assert row["prompt"] == chat
    assert main(["data", "jsonl", str(file), *options, "--instruction", "Briefly.", "--system", "Add."]) == 0
    (row,) = read_rows(str(tmp_path / "out" / "train.parquet"))
    assert row["prompt"] == [
        {"role": "system", "content": "Add."},
        *chat[1:3],
        {"role": "user", "content": "2 + 2? Briefly."},
    ]
    for wrong, words in (
        ({"prompt": {"a": 1}}, "must be text or a list of messages"),
        ({"question": "x"}, "--question-field"),
    ):
        file.write_text(json.dumps({**wrong, "answer": "4"}))
        assert main(["data", "jsonl", str(file), *options]) == 2
        assert words in capsys.readouterr().err


def test_wrong_data_ends_the_command_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "no mark"}')
    assert main(["data", "gsm8k", str(tmp_path), "--out", str(tmp_path / "out"), "--splits", "train"]) == 2
    assert "row 0 of GSM8K has no '####'" in capsys.readouterr().err
    assert main(["data", "gsm8k", str(tmp_path / "missing"), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_one_file_is_not_taken_for_both_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "all.jsonl").write_text("\n".join(json.dumps(row) for row in RAW))
    command = ["data", "gsm8k", str(tmp_path / "all.jsonl"), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "all.jsonl would be train and test alike" in capsys.readouterr().err
    assert main([*command, "--splits", "test"]) == 0
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["test.parquet"]


def test_math_takes_the_boxed_answer_as_truth() -> None:
    row = math_rows(MATH_RAW, "train", last_boxed)[0]
    assert row["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert row["extra_info"]["level"] == "Level 1"
    with pytest.raises(DataError, match="row 0 has no 'problem'"):
        math_rows([{"solution": r"\boxed{1}"}], "train", last_boxed)
    with pytest.raises(DataError, match="row 0 has no 'question'"):
        gsm8k_rows([{"answer": "#### 1"}], "train")


def test_gsm8k_can_be_cut_to_short_solutions_for_training_only(tmp_path: Path) -> None:
    answers = ["2 + 3 = <<2+3=5>>5\n#### 5", "<<1+1=2>>2, <<2*2=4>>4, <<4-1=3>>3\n#### 3"]
    for split in ("train", "test"):
        rows = [json.dumps({"question": f"{split} {i}?", "answer": answer}) for i, answer in enumerate(answers)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    assert (
        main(
            [
                "data",
                "gsm8k",
                str(tmp_path),
                "--out",
                str(tmp_path / "out"),
                "--max-calculations",
                "2",
                "--format",
                "jsonl",
            ]
        )
        == 0
    )
    train, test = (list(read_rows(str(tmp_path / "out" / f"{split}.jsonl"))) for split in ("train", "test"))
    assert [row["reward_model"]["ground_truth"] for row in train] == ["5"]
    assert [row["reward_model"]["ground_truth"] for row in test] == ["5", "3"]


def convert_jsonl(folder: Path, lines: list[dict[str, Any]]) -> int:
    file = folder / "mine.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return main(["data", "jsonl", str(file), "--out", str(folder / "out"), "--test-share", "0"])


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([], "there are no rows"),
        (["a", "b", None, "d"], "row 2: 'answer' is null"),
        (["a", ["b"]], "the rows do not fit the columns of"),
    ],
)
def test_a_jsonl_that_cannot_be_converted_is_a_message_that_names_the_row_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answers: list[Any], says: str
) -> None:
    assert convert_jsonl(tmp_path, [{"question": "q", "answer": answer} for answer in answers]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out" / "train.parquet").exists()


def test_answers_of_several_kinds_become_text(tmp_path: Path) -> None:
    assert convert_jsonl(tmp_path, [{"question": "q", "answer": answer} for answer in (4, 3.5, "four")]) == 0
    made = read_rows(str(tmp_path / "out" / "train.parquet"))
    assert sorted(row["reward_model"]["ground_truth"] for row in made) == ["3.5", "4", "four"]
