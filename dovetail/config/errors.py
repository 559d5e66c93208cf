"""What is wrong with a configuration, and what its author should know. All problems travel in one exception."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One mistake: the key, and a sentence that names the value, the rule and the fix."""

    key: str
    message: str

    def __str__(self) -> str:
        return self.message if self.key in self.message else f"{self.key}: {self.message}"


@dataclass(frozen=True)
class Notice:
    """Something that is not wrong but must not be silent: a translated spelling, a key without effect."""

    key: str
    message: str

    def __str__(self) -> str:
        return self.message if self.key in self.message else f"{self.key}: {self.message}"


class ConfigError(ValueError):
    """A configuration that cannot run, with every problem found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{count} problem{'s' * (count != 1)} in the configuration:\n{lines}")


def name_some(items: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return f"{', '.join(items[:3])}{more}"
