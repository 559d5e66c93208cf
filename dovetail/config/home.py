"""Paths of the configuration: `~` is expanded once, here, and not by every part that reads a path."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator


def from_home(path: str) -> str:
    """`path` with `~` as a shell would have it. Raises ValueError for the home of a user who does not exist."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ValueError(f"{user} is the home of no user here; write the whole path, or ./{path} for that very name.")
    return expanded


HomePath = Annotated[str, AfterValidator(from_home)]
