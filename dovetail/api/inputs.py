"""Data and rewards given as Python objects, as files that the processes of a run can read. Starts nothing."""

from __future__ import annotations

import filecmp
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.config.errors import ConfigError, Problem

Data = str | Path | Iterable[Any]
"""Files by path, or rows: a list of dicts, a `datasets.Dataset`, a `pandas.DataFrame`."""
Reward = str | Path | Callable[..., Any] | Sequence[Any]
"""A function, `file.py:function`, the name of a built-in rule, a reward model's path; or several of them, summed."""


def data_files(data: Data, folder: Path, name: str, *, own_class: bool = False) -> str | list[str]:
    """The paths of `data`. Rows are written to `folder`, one JSON object per line. A user's `own_class` of data may
    give strings any meaning."""
    if isinstance(data, str | Path):
        return str(data)
    to_dict = getattr(data, "to_dict", None)
    is_frame = hasattr(data, "iterrows") and callable(to_dict)  # of pandas
    if is_frame:
        data = to_dict("records")
    if isinstance(data, Mapping) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise _unusable(name, f"it is a {type(data).__name__}")
    entries: list[Any] = list(data)
    if entries and all(isinstance(entry, str | Path) for entry in entries):
        paths = [str(entry) for entry in entries]
        text = next((path for path in paths if not _names_a_file(path)), None)
        if text is not None and not own_class:
            raise _unusable(name, f"it holds the text {text[:60]!r}, and no file has that name")
        return paths
    wrong = next((entry for entry in entries if not isinstance(entry, Mapping)), None)
    if not entries or wrong is not None:
        shown = "it is empty" if not entries else f"it holds a {type(wrong).__name__}, {str(wrong)[:60]!r}"
        raise _unusable(name, shown)
    if is_frame or hasattr(data, "features"):  # `datasets.Dataset`
        entries = [{key: _cell(value) for key, value in entry.items()} for entry in entries]
    return str(_write(entries, folder / "data", name))


def reward_text(reward: Reward, folder: Path) -> str | list[str]:
    """`reward` as the short name takes it: functions by their address."""
    if isinstance(reward, str | Path):
        return str(reward)
    if callable(reward):
        return _address(reward, folder / "reward.pkl")
    if not isinstance(reward, Sequence):
        words = (
            f"it is a {type(reward).__name__}; give a function, `file.py:function`, a rule's name, or a list of them"
        )
        raise ConfigError([Problem("reward", f"reward: {words}.")])
    wrong = next((each for each in reward if not (callable(each) or isinstance(each, str | Path))), None)
    if wrong is not None:
        words = f"it holds a {type(wrong).__name__}; give functions, `file.py:function` and names of rules"
        raise ConfigError([Problem("reward", f"reward: {words}.")])
    return [
        _address(each, folder / f"reward_{number}.pkl") if callable(each) else str(each)
        for number, each in enumerate(reward)
    ]


def parameters(reward: Reward) -> list[str]:
    """The parameters of a reward function; of anything else none."""
    if not callable(reward):
        return []
    try:
        return list(inspect.signature(reward).parameters)
    except ValueError:
        return []


def _cell(value: Any) -> Any:
    """As it was before it was in a table: pandas has NaN for what is missing, Arrow gives messages and tools nulls."""
    from dovetail.data.files import without_nulls

    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return without_nulls(value)
    return None if value != value else value


def _names_a_file(path: str) -> bool:
    """One with an ending of data that is not there is a mistyped path."""
    from dovetail.data.files import ENDINGS

    return "://" in path or path.endswith(ENDINGS) or os.path.exists(os.path.expanduser(path))


def _unusable(name: str, shown: str) -> ConfigError:
    rows = "give a path, a list of paths, or rows such as [{'prompt': 'What is 1+1?'}]"
    return ConfigError([Problem(name, f"{name}: {shown}; {rows}.")])


def _address(function: Callable[..., Any], file: Path) -> str:
    """Where a scoring process finds the function: its module, or a file with the pickled function.

    Functions of `__main__` (a notebook, a script), local functions and lambdas are pickled by value.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    if module not in (None, "__main__") and getattr(sys.modules.get(str(module)), name, None) is function:
        return f"pkg://{module}:{name}"
    import cloudpickle

    try:
        pickled = cloudpickle.dumps(function)
    except Exception as error:  # a function may hold anything, and pickling it may raise anything
        words = f"{name or function!r} cannot be sent to the scoring processes ({type(error).__name__}: {error})"
        fix = "open files, locks and models inside the function, or put it into a module of its own"
        raise ConfigError([Problem("reward", f"reward: {words}; {fix}.")]) from error
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickled)
    return f"{file}:{name or type(function).__name__}"


def _write(rows: list[Mapping[str, Any]], folder: Path, name: str) -> Path:
    """`name.jsonl`, or with a number where that has other rows: a run in this folder may have been trained on them."""
    from dovetail.data.files import write_rows

    try:
        written = write_rows(rows, folder / f".{name}.jsonl")
    except TypeError as error:
        words = f"{name}: a row holds what JSON cannot ({error}); write a parquet file and give its path"
        raise ConfigError([Problem(name, f"{words}.")]) from error
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    files = (folder / f"{each}.jsonl" for each in names)
    return written.replace(
        next(file for file in files if not file.exists() or filecmp.cmp(file, written, shallow=False))
    )
