"""verl's data sources score as verl scores them, string by string, but for what `docs/rewards.md` lists.

`verl_scores.jsonl` holds `[data source, truth, answer, score]`, `verl_code_scores.jsonl` `[truth, program, score]`:
strings of ours, and the numbers that verl's functions gave for them (verl of January 2026).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.rewards.registry import default_compute_score
from dovetail.rewards.rules import latex
from dovetail.rewards.rules.expressions import NotAnExpression, parse_expression

pytestmark = pytest.mark.unit

_HERE = Path(__file__).parent
SQUARE = {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]}
PROGRAM = "n=int(input())\nprint(n*n)\n"


def recorded(name: str) -> list[Any]:
    return [json.loads(line) for line in (_HERE / name).read_text().splitlines()]


@pytest.mark.parametrize(
    "source",
    ["openai/gsm8k", "lighteval/MATH", "math_dapo", "numina_olympiads", "hiyouga/geometry3k", "searchR1_"],
)
def test_answers_score_as_in_verl(source: str) -> None:
    rows = [row for row in recorded("verl_scores.jsonl") if row[0].startswith(source)]
    assert len(rows) > 150, "each source needs rows that are right and rows that are wrong"
    assert len({score for *_, score in rows}) > 1
    differing = [
        (answer, truth, score, ours)
        for name, truth, answer, score in rows
        if (ours := default_compute_score(name, answer, truth)["score"]) != pytest.approx(score)
    ]
    assert not differing


def test_programs_score_as_in_verl() -> None:
    differing = [
        (program, score, ours)
        for truth, program, score in recorded("verl_code_scores.jsonl")
        if (ours := default_compute_score("apps", program, truth)["score"]) != pytest.approx(score)
    ]
    assert not differing


@pytest.mark.parametrize("answer", ["So the answer: 34", "</think>Answer: 34", "\\boxed{7}\nAnswer: 34"])
def test_dapo_reads_the_answer_its_prompt_asks_for(answer: str) -> None:
    assert default_compute_score("math_dapo", answer, "34") == {"score": 1.0, "acc": 1.0, "pred": "34"}


@pytest.mark.parametrize(
    ("source", "truth", "answer", "ours"),
    [
        ("openai/gsm8k", 18, "#### 18", 1.0),
        ("openai/gsm8k", "70,000", "#### 70,000", 1.0),
        ("lighteval/MATH", r"We get \boxed{7}.", r"\boxed{7}", 1.0),
        ("numina_olympiads", r"\sqrt{2}", r"\boxed{\sqrt[3]{2}}", 0.0),
        ("numina_olympiads", r"\frac{x+1}{2}", r"\boxed{(x+1)/2}", 1.0),
        ("numina_olympiads", r"\frac{x+1}{2}", r"\boxed{x+\frac{1}{2}}", 0.0),
        ("numina_olympiads", "yes", r"\boxed{\mbox{yes}}", 1.0),
        ("numina_olympiads", "34", r'\boxed{"34"}', 0.0),
        ("apps", SQUARE, f"```\n{PROGRAM}```", 1.0),
        ("apps", SQUARE, f"{PROGRAM}exit()", 1.0),
        ("apps", SQUARE, f"if __name__ == '__main__':\n    {PROGRAM.replace(chr(10), chr(10) + '    ')}\nx = 1", 1.0),
        ("apps", SQUARE, f"from __future__ import annotations\n{PROGRAM}", 1.0),
        ("apps", {"inputs": [["5", "6"]], "outputs": [["5", "6"]]}, "print(input())\nprint(input())", 1.0),
        ("apps", {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}, "def plus(a, b): return a + b", 0.0),
        ("apps", {"fn_name": "f", "inputs": ["0"], "outputs": ["[1, 2]"]}, "def f(x): return 1", 0.0),
    ],
)
def test_differences_from_verl_that_are_kept(source: str, truth: Any, answer: str, ours: float) -> None:
    assert default_compute_score(source, answer, truth)["score"] == ours


def test_a_program_that_fails_a_late_test_is_not_fully_right() -> None:
    numbers = [str(i) for i in range(12)]
    program = "n = input()\nprint(n if n != '11' else 'no')"
    result = default_compute_score("apps", program, {"inputs": numbers, "outputs": numbers})
    assert (result["score"], result["acc"]) == (pytest.approx(11 / 12), 0.0)


def test_truths_may_be_arrays_as_parquet_gives_them() -> None:
    truth = {"target": np.array(["Paris", "Lutetia"], dtype=object)}
    assert default_compute_score("searchR1_nq", "<answer>lutetia</answer>", truth)["score"] == 1.0


@pytest.mark.parametrize(
    "text", ["__import__('os')", "2**99999", "9^9^9^9", "(1", "1+", "x.y", "f(x)=[1]", "1000!", "a" * 400]
)
def test_expressions_are_read_never_run(text: str) -> None:
    with pytest.raises(NotAnExpression):
        parse_expression(text)


def test_a_matrix_keeps_its_row_breaks() -> None:
    spaced, tight = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"
    assert latex.normalize(spaced) == tight
    assert latex.same_answer(spaced, tight)
    assert latex.normalize(r"3\ \text{cm}") == latex.normalize("3 cm")
