"""Turn a plain tree into the typed configuration, or into one problem per wrong key. Reads no file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from dovetail.config.errors import Problem
from dovetail.config.keys import Key, catalogue, find_key, nearest_key, sections
from dovetail.config.names import unknown_names
from dovetail.config.root import DovetailConfig
from dovetail.config.translate.peers import usual_name
from dovetail.config.translate.short import SHORT_NAMES
from dovetail.config.tree import Tree, nested, prefixes
from dovetail.config.wording import nearest


def unknown_keys(values: Mapping[str, Any], spelling: Mapping[str, str] | None = None) -> list[Problem]:
    """One problem for each leaf key that does not exist, with the nearest one that does.

    `spelling` is how a key was written where it was read as another.
    """
    problems: list[Problem] = []
    for key, value in values.items():
        if key in sections(DovetailConfig):
            if value not in (None, {}):
                problems.append(Problem(key, f"{key}={value!r}: {key} is a section; set the keys below it."))
        elif find_key(DovetailConfig, key) is None:
            written = (spelling or {}).get(key, key)
            usual = usual_name(written)
            name = written if usual or written == key else f"{written}, which is read as {key},"
            problems.append(Problem(key, f"{name} is not a known key{usual or suggestion(key)}"))
    return problems


def suggestion(key: str) -> str:
    """The end of a sentence about an unknown key."""
    if (usual := usual_name(key.removeprefix("trainer."))) is not None:
        return usual
    near = nearest_key(DovetailConfig, key) or nearest(key, SHORT_NAMES)
    if f"{near}.path" in catalogue(DovetailConfig):  # a section that stands for a model or a function
        near = f"{near}.path"
    return f"; did you mean {near}?" if near else "; docs/configuration.md lists all keys."


def build(values: Mapping[str, Any]) -> tuple[DovetailConfig | None, list[Problem]]:
    """The configuration that these leaf keys describe, or every problem with their values."""
    problems = _impossible(values)
    problems += [Problem(key, message) for key, message in unknown_names(values).items()]
    given = {key: value for key, value in values.items() if value is not None or key not in sections(DovetailConfig)}
    try:
        config = DovetailConfig.model_validate(nested(given))
    except ValidationError as error:
        problems += _problems_of(error, values)
        return None, _once_per_key(problems)
    return (None, _once_per_key(problems)) if problems else (config, [])


def default_tree() -> Tree:
    """Every default as a plain tree, for interpolations that name keys nobody set."""
    return DovetailConfig().model_dump(mode="json")


def _impossible(values: Mapping[str, Any]) -> list[Problem]:
    """Values that no run can mean, wherever they come from; also in mappings whose keys are free."""
    problems: list[Problem] = []
    for key, value in values.items():
        known = catalogue(DovetailConfig).get(key)
        # `lr=True` would quietly become 1.0.
        if isinstance(value, bool) and known and known.accepts(int, float) and not known.accepts(bool):
            problems.append(_wrong_value(known, value))
        # A seed is any number of 64 bits; everything else that is counted is a size.
        limit = _LARGEST_INTEGER if key.endswith("seed") or known is None else _LARGEST_SIZE
        for inner in _scalars(value):
            if (why := _why_impossible(inner, limit)) is not None:
                problems.append(Problem(key, f"{key}={_shown(value)} is not accepted: {why}."))
                break
    return problems


def _why_impossible(value: Any, limit: int) -> str | None:
    if isinstance(value, str):
        return "a text cannot hold a NUL character" if "\0" in value else None
    if isinstance(value, float):
        if not math.isfinite(value):
            return "it must be a finite number"
        return f"no setting of a run is beyond {_LARGEST_NUMBER:g}" if abs(value) > _LARGEST_NUMBER else None
    if isinstance(value, int) and abs(value) > limit:
        return f"no setting of a run is beyond {limit:,}"
    return None


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from _scalars(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _scalars(inner)
    else:
        yield value


_LARGEST_NUMBER = 1e15
_LARGEST_SIZE = 1 << 40
_LARGEST_INTEGER = (1 << 63) - 1


def _problems_of(error: ValidationError, values: Mapping[str, Any]) -> list[Problem]:
    mine: list[Problem] = []
    inherited: list[Problem] = []
    details = error.errors(include_url=False, include_context=False)
    # Of the branches of a union, the one whose rule speaks says more than those of other types.
    for detail in sorted(details, key=lambda detail: detail["type"] != "value_error"):
        if not detail["loc"]:
            continue  # the root's own check of names, reported by key already
        name = ".".join(str(part) for part in detail["loc"])
        key = _known_prefix(name)
        if key is None:
            mine.append(Problem(name, f"{name}: {detail['msg']}"))
            continue
        written = any(leaf == key.name or leaf.startswith(f"{key.name}.") for leaf in values)
        value = values.get(key.name, detail["input"])
        problem = _wrong_value(key, value, detail["msg"] if detail["type"] == "value_error" else "")
        (mine if written else inherited).append(problem)
    # A wrong value is reported where it was written, not at the keys that inherit it.
    return mine or inherited


def _known_prefix(name: str) -> Key | None:
    """The key that an error is about; pydantic appends list positions and union branches to it."""
    known = catalogue(DovetailConfig)
    return next((known[prefix] for prefix in prefixes(name) if prefix in known), None)


def _wrong_value(key: Key, value: Any, rule: str = "") -> Problem:
    close = _close_choice(key, value)
    shell = isinstance(value, str) and "$" in value
    fix = f" Did you mean {close}?" if close else ""
    fix += " Replace the shell variable by its value." if shell else ""
    if rule:
        return Problem(key.name, f"{key.name}={_shown(value)}: {rule.removeprefix('Value error, ')}{fix}")
    return Problem(key.name, f"{key.name}={_shown(value)} is not accepted; it must be {key.type_in_words}.{fix}")


def _close_choice(key: Key, value: Any) -> str | None:
    annotation = key.field.annotation
    choices = [
        str(choice)
        for kind in (annotation, *get_args(annotation))
        if get_origin(kind) is Literal
        for choice in get_args(kind)
    ]
    if key.accepts(bool):
        choices += ["True", "False"]
    other_name = _OTHER_NAMES.get(str(value).lower())
    return other_name if other_name in choices else nearest(value, choices)


# What other programs call a choice; the nearest spelling would be something else.
_OTHER_NAMES = {"gpu": "cuda"}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    try:
        text = "null" if value is None else repr(value)
    except ValueError:  # Python does not write out integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:197]}..."


def _once_per_key(problems: list[Problem]) -> list[Problem]:
    first: dict[str, Problem] = {}
    for problem in problems:
        first.setdefault(problem.key, problem)
    return list(first.values())
