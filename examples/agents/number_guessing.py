"""Guess a number in text: `guess 512`. The environment answers higher or lower."""

from __future__ import annotations

import random
import re

from dovetail.agents import Environment, Step, Task

MOST = 10


class NumberGuessing(Environment):
    """A number from 1 to `extra_info.largest` (64); the fewer guesses, the better."""

    def reset(self, task: Task) -> str:
        largest = (task.row.get("extra_info") or {}).get("largest", 64)
        self.low, self.high, self.asked = 1, int(largest), 0
        # The samples of a prompt guess the same number, so that they can be compared.
        self.secret = random.Random(task.uid).randint(self.low, self.high)
        return f"I think of a number from 1 to {largest}. Write `guess` and a number."

    def step(self, action: str) -> Step:
        self.asked += 1
        numbers = re.findall(r"guess\s*:?\s*(-?\d+)", action.lower())
        if not numbers:
            return self._answer("Write `guess` and a number.", -0.1)
        guess = int(numbers[-1])
        if guess == self.secret:
            return Step("Right!", reward=1.0 - 0.05 * (self.asked - 1), done=True, info={"guesses": self.asked})
        possible = self.low <= guess <= self.high
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        # A guess that the answers so far rule out costs a little.
        return self._answer("Higher." if guess < self.secret else "Lower.", 0.0 if possible else -0.05)

    def _answer(self, text: str, reward: float) -> Step:
        if self.asked >= MOST:
            return Step(f"{text} It was {self.secret}.", reward, done=True, info={"guesses": self.asked})
        return Step(text, reward)

    def state(self) -> list[int]:
        return [self.secret, self.low, self.high, self.asked]

    def restore(self, state: list[int]) -> None:
        self.secret, self.low, self.high, self.asked = state
