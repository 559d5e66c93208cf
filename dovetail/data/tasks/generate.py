"""Draw training and test problems that share none. The same arguments give the same files on every machine."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.data.errors import DataError
from dovetail.data.tasks import numbers, words
from dovetail.data.tasks.problem import Problem, Task
from dovetail.data.write import prompt_row

TASKS: dict[str, Task] = {task.name: task for task in (*numbers.TASKS, *words.TASKS)}
# Draws without a new problem before a level counts as used up.
_PATIENCE = 2000


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
        rng = random.Random(f"{seed}/{name}/{level}")
        drawn = _draw(task, rng, level, for_train + for_test, taken)
        test += [(level, problem) for problem in drawn[:for_test]]
        train += [(level, problem) for problem in drawn[for_test:]]
    return TaskSplit(_rows(task, train, "train", seed, system), _rows(task, test, "test", seed, system))


def _draw(task: Task, rng: random.Random, level: int, count: int, taken: set[Hashable]) -> list[Problem]:
    drawn: list[Problem] = []
    misses = 0
    while len(drawn) < count:
        problem = task.make(rng, level)
        if problem.key in taken:
            misses += 1
            if misses > _PATIENCE:
                raise DataError(
                    f"level {level} of {task.name} ({task.levels[level - 1]}) has hardly more than {len(drawn)} "
                    f"different problems and {count} are asked for; ask for fewer, or add levels."
                )
            continue
        misses = 0
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
