"""Types of the options of commands (argparse's `type=`): numbers in a range, and paths that can be written. What is
wrong is refused while the line is read, before a model is loaded."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from dovetail.observability.disk import why_not_writable

_MANY = 10**9


def whole_number(least: int = 1, most: int = _MANY) -> Callable[[str], int]:
    """An integer from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least:,} to {most:,}.")
        return value

    return read


def number(least: float = 0.0, most: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """A finite number from `least` (with `above`: more than that) to `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not least <= value <= most or (above and value == least):
            to = "" if most == math.inf else f" and at most {most:g}"
            raise argparse.ArgumentTypeError(
                f"{text!r} is no number {'above' if above else 'of at least'} {least:g}{to}."
            )
        return value

    return read


def output_file(text: str) -> Path:
    """A file that a command writes at its end; folders above it may be missing."""
    return _output(Path(text).expanduser(), is_folder=False)


def output_folder(text: str) -> Path:
    """A folder that a command writes into; it, and folders above it, may be missing."""
    return _output(Path(text).expanduser(), is_folder=True)


def _output(path: Path, *, is_folder: bool) -> Path:
    if (why := why_not_writable(path, is_folder=is_folder)) is not None:
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {why}.")
    return path
