"""What is wrong with a configuration, and what its author should know. All problems travel in one exception."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "notice"]


@dataclass(frozen=True)
class Problem:
    """One thing to say about a key, in a sentence that names the value, the rule and the fix.

    An error cannot run, or would do something else than asked. A warning runs and is surely not what was meant.
    """

    key: str
    message: str
    severity: Severity = "error"

    def __str__(self) -> str:
        return self.message if self.key in self.message else f"{self.key}: {self.message}"


@dataclass(frozen=True)
class Notice(Problem):
    """Something that is not wrong but must not be silent: a translated spelling, a key without effect."""

    severity: Severity = "notice"


class ConfigError(ValueError):
    """A configuration that cannot run, with every problem found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{count} problem{'s' * (count != 1)} in the configuration:\n{lines}")
