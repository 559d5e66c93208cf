"""Wordle in text: the model writes `[crane]`, the environment colours the letters."""

from __future__ import annotations

import random
import re
from collections import Counter

from dovetail.agents import Environment, Step, Task

_WORDS = (
    "apple bread chair crane dance eagle flame grape house image juice knife lemon mango night ocean piano queen river "
    "sheep table uncle voice water youth zebra beach cloud dream earth fruit green heart light money north paper quiet "
    "round stone train under wheat world brick candy fence glass honey input"
)
WORDS = _WORDS.split()
MOST = 6


def colour(guess: str, word: str) -> str:
    """G: right place, Y: elsewhere in the word, -: not in it, or not so often."""
    left = Counter(letter for letter, wanted in zip(word, guess, strict=True) if letter != wanted)
    marks = []
    for letter, wanted in zip(guess, word, strict=True):
        if letter == wanted:
            marks.append("G")
        elif left[letter] > 0:
            left[letter] -= 1
            marks.append("Y")
        else:
            marks.append("-")
    return "".join(marks)


class Wordle(Environment):
    """A word of five letters in six guesses. The score is 1 for the word, less for what was coloured."""

    def reset(self, task: Task) -> str:
        self.word = (task.row.get("extra_info") or {}).get("word") or random.Random(task.uid).choice(WORDS)
        self.guesses: list[str] = []
        return "Guess an English word of five letters. Write it in brackets: [crane]."

    def step(self, action: str) -> Step:
        found = re.findall(r"\[([a-z]{5})\]", action.lower())
        if not found:
            self.guesses.append("")
            return Step("Write one word of five letters in brackets.", done=len(self.guesses) >= MOST)
        self.guesses.append(found[-1])
        if found[-1] == self.word:
            return Step("GGGGG. That is the word!", done=True, info={"guesses": len(self.guesses)})
        over = len(self.guesses) >= MOST
        return Step(f"{colour(found[-1], self.word)}{f'. It was {self.word}.' if over else ''}", done=over)

    def get_reward(self) -> float:
        marks = [colour(guess, self.word) for guess in self.guesses if guess]
        best = max((mark.count("G") * 0.1 + mark.count("Y") * 0.04 for mark in marks), default=0.0)
        return 1.0 if self.word in self.guesses else best

    def state(self) -> dict[str, object]:
        return {"word": self.word, "guesses": self.guesses}

    def restore(self, state: dict[str, object]) -> None:
        vars(self).update(state)
