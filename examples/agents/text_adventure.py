"""A house of four rooms, in text: find the key, open the chest. What the model says is what it does."""

from __future__ import annotations

import random

from dovetail.agents import Environment, Step, Task

DOORS = {
    "hall": {"north": "kitchen", "east": "library"},
    "kitchen": {"south": "hall"},
    "library": {"west": "hall", "up": "attic"},
    "attic": {"down": "library"},
}
MOST = 15


class TextAdventure(Environment):
    """The key and the chest are in two rooms, other ones for each prompt."""

    def reset(self, task: Task) -> str:
        self.key, self.chest = random.Random(task.uid).sample(sorted(DOORS), 2)
        self.room, self.has_key, self.moves = "hall", False, 0
        return f"Find the key and open the chest. Say: go north, take key, open chest. {self._look()}"

    def step(self, action: str) -> Step:
        self.moves += 1
        words = action.lower().replace(".", " ").split()
        over = self.moves >= MOST
        way = next((word for word in words if word in DOORS[self.room]), None)
        if "open" in words and self.room == self.chest and self.has_key:
            return Step("The chest is open!", reward=1.0 - 0.02 * self.moves, done=True, info={"moves": self.moves})
        if "take" in words and self.room == self.key and not self.has_key:
            self.has_key = True
            return Step(f"You have the key. {self._look()}", reward=0.2, done=over)
        if "open" in words and self.room == self.chest:
            return Step("It is locked.", reward=0.0, done=over)
        if way is not None:
            self.room = DOORS[self.room][way]
            return Step(self._look(), reward=0.0, done=over)
        return Step(f"You cannot do that here. {self._look()}", reward=-0.05, done=over)

    def _look(self) -> str:
        things = [name for name, here in (("a key", self._key_is_here()), ("a chest", self.room == self.chest)) if here]
        seen = f" There is {' and '.join(things)}." if things else ""
        return f"You are in the {self.room}.{seen} Doors: {', '.join(DOORS[self.room])}."

    def _key_is_here(self) -> bool:
        return self.room == self.key and not self.has_key

    def state(self) -> dict[str, object]:
        return dict(vars(self))

    def restore(self, state: dict[str, object]) -> None:
        vars(self).update(state)
