"""Letters, order and reversal: tasks on words that need no dictionary."""

from __future__ import annotations

import random

from dovetail.data.tasks.problem import Problem, Task

_CONSONANTS, _VOWELS = "bcdfglmnprst", "aeiou"


def _letters(rng: random.Random, level: int) -> Problem:
    word = _word(rng, 2 + 2 * level)
    # A letter of the word three times out of four; otherwise any, so that the answer may be 0.
    letter = rng.choice(word) if rng.random() < 0.75 else rng.choice(_CONSONANTS + _VOWELS)
    question = f'How many times does the letter "{letter}" occur in "{word}"? Answer with the number only.'
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


TASKS = (
    Task("letters", "language", _letters, tuple(f"words of {2 + 2 * n} letters" for n in range(1, 7))),
    Task("sorting", "logic", _sorting, tuple(f"{n + 2} numbers" for n in range(1, 9))),
    Task("reversal", "language", _reversal, tuple(f"words of {n + 2} letters" for n in range(1, 9))),
)
