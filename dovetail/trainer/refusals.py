"""Errors that a user can fix, and collecting them, so that a run names all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from dovetail.agents.chat import ChatTemplateError
from dovetail.agents.tools.schema import ToolError
from dovetail.checkpoint.manifest import BrokenCheckpoint
from dovetail.config import ConfigError
from dovetail.config.errors import Problem
from dovetail.config.hub import HubError
from dovetail.config.user_code import UserCodeError
from dovetail.data.errors import DataError, DataNotHereError
from dovetail.models.errors import ModelError
from dovetail.observability.disk import DiskFullError
from dovetail.observability.run_lock import RunFolderInUse
from dovetail.observability.sinks import MissingTrackerError
from dovetail.rewards.errors import RewardError
from dovetail.trainer.stalled import TrainingStalled

USER_ERRORS = (
    ConfigError,
    DataError,
    ModelError,
    RunFolderInUse,
    TrainingStalled,
    RewardError,
    UserCodeError,
    ChatTemplateError,
    ToolError,
    FileNotFoundError,
    DiskFullError,
    BrokenCheckpoint,
    MissingTrackerError,
)
"""Errors that a user can fix: commands print only the message and exit with 2. All others keep their traceback."""


class Refusals:
    """A block of parts that do not need each other. Its end raises what they refused: one error as it is, several as a
    `ConfigError`."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    def __enter__(self) -> Self:
        return self

    @contextmanager
    def part(self) -> Iterator[None]:
        """An error of the user's ends only this part."""
        try:
            yield
        except USER_ERRORS as error:
            self._errors.append(error)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if kind is not None or not self._errors:
            return
        if len(self._errors) == 1:
            raise self._errors[0]
        raise ConfigError(list(dict.fromkeys(problem for error in self._errors for problem in problems_of(error))))


def problems_of(error: Exception) -> tuple[Problem, ...]:
    """An error as findings. What is on the hub and cannot be had here may be there where the run is: a warning."""
    if isinstance(error, ConfigError):
        return error.problems
    return (Problem("", str(error), "warning" if isinstance(error, HubError | DataNotHereError) else "error"),)
