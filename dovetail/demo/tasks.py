"""Tasks that are generated, not downloaded, in levels of difficulty: sums, countdown, letters, sorting.

Training and test problems share none, and the same arguments give the same rows on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from dovetail.data.errors import DataError
from dovetail.data.files import prompt_row

# Repeated problems in a row before a level counts as used up.
_MAX_REPEATS = 2000
_ONLY_NUMBER = "Answer with the number only."
_CONSONANTS, _VOWELS = "bcdfglmnprst", "aeiou"


@dataclass(frozen=True)
class Problem:
    """A question and its truth. Problems with the same `key` are the same: `3 + 4` and `4 + 3`."""

    question: str
    ground_truth: Any
    key: Hashable


@dataclass(frozen=True)
class Task:
    """A family of problems. `make(rng, level)` draws one; `levels` says what each level means."""

    name: str
    ability: str
    make: Callable[[random.Random, int], Problem]
    levels: tuple[str, ...]

    @property
    def data_source(self) -> str:
        """The name by which the reward rule is found."""
        return f"dovetail/{self.name}"


@dataclass(frozen=True)
class TaskSplit:
    """Rows for training and for testing, in random order of level."""

    train: list[dict[str, Any]]
    test: list[dict[str, Any]]


def generate_task(
    name: str, *, num_train: int, num_test: int, levels: Sequence[int] = (1,), seed: int = 0, system: str | None = None
) -> TaskSplit:
    """Problems spread evenly over `levels`. No problem is in both parts, nor twice in one."""
    if name not in TASKS:
        raise DataError(f"there is no task {name!r}; there are {', '.join(TASKS)}.")
    task = TASKS[name]
    wrong = [level for level in levels if not 1 <= level <= len(task.levels)]
    if wrong or not levels:
        raise DataError(
            f"level {wrong[0] if wrong else 'none'} of {name} does not exist; levels are 1 to {len(task.levels)}."
        )
    train: list[tuple[int, Problem]] = []
    test: list[tuple[int, Problem]] = []
    taken: set[Hashable] = set()
    for level, for_train, for_test in zip(levels, _share(num_train, levels), _share(num_test, levels), strict=True):
        drawn = _draw(task, _rng(task, level, seed), level, for_train + for_test, taken)
        test += [(level, problem) for problem in drawn[:for_test]]
        train += [(level, problem) for problem in drawn[for_test:]]
    return TaskSplit(_rows(task, train, "train", seed, system), _rows(task, test, "test", seed, system))


def easiest_level(name: str, count: int, seed: int = 0) -> int:
    """The first level with so many different problems; the last one where none has."""
    task = TASKS[name]
    for level in range(1, len(task.levels)):
        try:
            _draw(task, _rng(task, level, seed), level, count, set())
        except DataError:
            continue
        return level
    return len(task.levels)


def with_pairs(rows: Sequence[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """The rows with preference pairs: `chosen` is the truth, `rejected` the truth of another problem."""
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    if not rows:
        return []
    if not all(isinstance(truth, str) for truth in truths):
        raise DataError(f"pairs need answers that are text, and this task's are {type(truths[0]).__name__}s.")
    if len(set(truths)) < 2:
        raise DataError(f"pairs need problems with different answers, and all {len(truths)} have one; ask for more.")
    rng = random.Random(f"{seed}/pairs")
    paired = []
    for row, truth in zip(rows, truths, strict=True):
        wrong = truth
        while wrong == truth:
            wrong = rng.choice(truths)
        paired.append({**row, "chosen": truth, "rejected": wrong})
    return paired


def _rng(task: Task, level: int, seed: int) -> random.Random:
    return random.Random(f"{seed}/{task.name}/{level}")


def _draw(task: Task, rng: random.Random, level: int, count: int, taken: set[Hashable]) -> list[Problem]:
    drawn: list[Problem] = []
    repeats = 0
    while len(drawn) < count:
        problem = task.make(rng, level)
        if problem.key in taken:
            repeats += 1
            if repeats > _MAX_REPEATS:
                raise DataError(
                    f"level {level} of {task.name} ({task.levels[level - 1]}) has hardly more than {len(drawn)} "
                    f"different problems and {count} are asked for; ask for fewer, or add levels."
                )
            continue
        repeats = 0
        taken.add(problem.key)
        drawn.append(problem)
    return drawn


def _rows(
    task: Task, problems: list[tuple[int, Problem]], split: str, seed: int, system: str | None
) -> list[dict[str, Any]]:
    random.Random(f"{seed}/{task.name}/{split}").shuffle(problems)
    return [
        prompt_row(
            data_source=task.data_source,
            question=problem.question,
            ground_truth=problem.ground_truth,
            ability=task.ability,
            extra_info={"split": split, "index": index, "level": level},
            system=system,
        )
        for index, (level, problem) in enumerate(problems)
    ]


def _share(total: int, levels: Sequence[int]) -> list[int]:
    """Equal parts; the first ones take what is left over."""
    whole, rest = divmod(total, len(levels))
    return [whole + (i < rest) for i in range(len(levels))]


def _addition(rng: random.Random, level: int) -> Problem:
    a, b = _digits(rng, level), _digits(rng, level)
    return Problem(f"What is {a} + {b}? {_ONLY_NUMBER}", str(a + b), tuple(sorted((a, b))))


def _multiplication(rng: random.Random, level: int) -> Problem:
    a, b = _digits(rng, (level + 2) // 2), _digits(rng, (level + 1) // 2)
    return Problem(f"What is {a} * {b}? {_ONLY_NUMBER}", str(a * b), tuple(sorted((a, b))))


def _expression(rng: random.Random, level: int) -> Problem:
    value = rng.randint(1, 9)
    text, is_sum = str(value), False
    for _ in range(level):
        sign, operand = rng.choice("+-*"), rng.randint(1, 9)
        if sign == "*" and is_sum:
            text = f"({text})"
        text, is_sum = f"{text} {sign} {operand}", sign != "*"
        value = {"+": value + operand, "-": value - operand, "*": value * operand}[sign]
    return Problem(f"What is {text}? {_ONLY_NUMBER}", str(value), text)


def _countdown(rng: random.Random, level: int) -> Problem:
    """Numbers first, then a way to combine them all: every problem has a solution."""
    count, largest = min(level + 1, 6), 9 if level == 1 else 20 if level == 2 else 99
    while True:
        numbers = [rng.randint(1, largest) for _ in range(count)]
        target = _combine(rng, [Fraction(number) for number in numbers])
        if target is not None and target.denominator == 1 and 1 <= target <= 999 and target not in numbers:
            break
    question = (
        f"Using the numbers {', '.join(map(str, numbers))}, each exactly once, and + - * / with parentheses, make "
        f"{target}. Write the expression between <answer> and </answer>."
    )
    truth = {"target": int(target), "numbers": numbers}
    return Problem(question, truth, (int(target), *sorted(numbers)))


def _combine(rng: random.Random, values: list[Fraction]) -> Fraction | None:
    while len(values) > 1:
        rng.shuffle(values)
        a, b = values.pop(), values.pop()
        sign = rng.choice("+-*/")
        if sign == "/" and b == 0:
            return None
        values.append({"+": a + b, "-": a - b, "*": a * b, "/": a / (b or 1)}[sign])
    return values[0]


def _digits(rng: random.Random, count: int) -> int:
    return rng.randint(0 if count == 1 else 10 ** (count - 1), 10**count - 1)


def _letters(rng: random.Random, level: int) -> Problem:
    word = _word(rng, 2 + 2 * level)
    # A letter of the word three times out of four; otherwise any, so that the answer may be 0.
    letter = rng.choice(word) if rng.random() < 0.75 else rng.choice(_CONSONANTS + _VOWELS)
    question = f'How many times does the letter "{letter}" occur in "{word}"? {_ONLY_NUMBER}'
    return Problem(question, str(word.count(letter)), (word, letter))


def _sorting(rng: random.Random, level: int) -> Problem:
    numbers = rng.sample(range(100), level + 2)
    text = ", ".join(map(str, numbers))
    question = f"Sort these numbers from smallest to largest: {text}. Answer with the list only."
    return Problem(question, ", ".join(map(str, sorted(numbers))), tuple(numbers))


def _reversal(rng: random.Random, level: int) -> Problem:
    word = _word(rng, level + 2)
    return Problem(f'Write "{word}" backwards. Answer with the word only.', word[::-1], word)


def _word(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(_VOWELS if i % 2 else _CONSONANTS) for i in range(length))


_DIGITS = tuple(f"numbers of {n} digit{'s' * (n > 1)}" for n in range(1, 7))
_FACTORS = tuple(f"{(n + 2) // 2} by {(n + 1) // 2} digits" for n in range(1, 7))
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("addition", "math", _addition, _DIGITS),
        Task("multiplication", "math", _multiplication, _FACTORS),
        Task("arithmetic", "math", _expression, tuple(f"{n + 1} numbers" for n in range(1, 7))),
        Task("countdown", "math", _countdown, tuple(f"{n + 1} numbers" for n in range(1, 6))),
        Task("letters", "language", _letters, tuple(f"words of {2 + 2 * n} letters" for n in range(1, 7))),
        Task("sorting", "logic", _sorting, tuple(f"{n + 2} numbers" for n in range(1, 9))),
        Task("reversal", "language", _reversal, tuple(f"words of {n + 2} letters" for n in range(1, 9))),
    )
}
