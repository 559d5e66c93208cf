"""A flat catalogue of every key: its field, its type in words, and the nearest known key to a wrong one."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dovetail.config.base import Rule, bounds_of, extra_of
from dovetail.config.tree import prefixes
from dovetail.config.wording import nearest


@dataclass(frozen=True)
class Key:
    """One settable key."""

    name: str
    field: FieldInfo
    rules: tuple[Rule, ...] = ()
    """What a run does with it beside reading it: the field's own rules, then those of the sections around it,
    the outermost first."""

    @property
    def inherits(self) -> str | None:
        """The key whose value stands in for null, if any."""
        return extra_of(self.field, "inherits")

    @property
    def keeps_null(self) -> bool:
        """Whether null is a value of its own, though the key inherits."""
        return bool(extra_of(self.field, "keeps_null"))

    @property
    def other_names(self) -> list[str]:
        """Full names under which older launch lists set it."""
        section = self.name.rpartition(".")[0]
        return [f"{section}.{name}" for name in (extra_of(self.field, "was") or "").split()]

    @property
    def other_values(self) -> Mapping[Any, Any]:
        """Other spellings of values, and what they are read as."""
        return extra_of(self.field, "reads") or {}

    @property
    def free_form(self) -> bool:
        """Whether anything may be written below this key."""
        return any(typing.get_origin(kind) is dict or kind is dict for kind in _alternatives(self.field.annotation))

    @property
    def type_in_words(self) -> str:
        """The accepted values in words, for messages and documents: `an integer >= 1, or null`."""
        names = [_describe(kind) for kind in _alternatives(self.field.annotation)]
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        bounds = " and ".join(f"{signs[name]} {bound}" for name, bound in bounds_of(self.field).items())
        words = " or ".join(name for name in names if name != "null") + (f" {bounds}" if bounds else "")
        return words + (", or null" if "null" in names else "")

    @property
    def default(self) -> Any:
        """The default, or None where there is none."""
        value = self.field.default
        return None if value is PydanticUndefined else value

    def accepts(self, *kinds: type) -> bool:
        """Whether one of `kinds` is a declared type."""
        return any(kind in _alternatives(self.field.annotation) for kind in kinds)


_SECRET = re.compile(r"(api_?key|access_?key|password|secret|auth_?token|hf_?token)", re.IGNORECASE)


def is_secret_key(name: str) -> bool:
    """Whether the value of a key must not be shown: free-form sections may hold anything."""
    return _SECRET.search(name) is not None


@cache
def catalogue(root: type[BaseModel]) -> dict[str, Key]:
    """Every key of `root` that is not a section, in the order of declaration."""
    return {key.name: key for key in _walk(root, "")}


@cache
def sections(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Every section of `root` by its key."""
    known: dict[str, type[BaseModel]] = {}
    for name, field in root.model_fields.items():
        if (section := section_of(field)) is not None:
            known[name] = section
            known |= {f"{name}.{below}": inner for below, inner in sections(section).items()}
    return known


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section class of a field that is one."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def find_key(root: type[BaseModel], name: str) -> Key | None:
    """The catalogue's key for `name`: itself, or the free-form key that it lies below."""
    known = catalogue(root)
    for above in prefixes(name):
        if above in known:
            return known[above] if above == name or known[above].free_form else None
        section = sections(root).get(above)
        if section is not None:
            leaf = name.removeprefix(f"{above}.").partition(".")[0]
            passed_on: tuple[str, ...] = getattr(section, "passed_on", ())
            extra = bool(passed_on) and (leaf in passed_on or leaf.startswith("_"))
            return Key(name, FieldInfo(annotation=dict[str, Any])) if extra else None
    return None


def nearest_key(root: type[BaseModel], name: str) -> str | None:
    """The known key that a wrong one most likely means."""
    known = list(catalogue(root)) + list(sections(root))
    section, _, leaf = name.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    if close := nearest(leaf, siblings):
        return siblings[close]
    namesakes = [key for key in known if key.rpartition(".")[2] == leaf]
    if namesakes:
        words = set(name.split("."))

        def likeness(key: str) -> tuple[int, float]:
            ratio = _ratio(section, key.rpartition(".")[0])  # sections that are not misspelt say nothing by theirs
            return len(words & set(key.split("."))), ratio if ratio >= 0.8 else 0.0

        return max(namesakes, key=likeness)
    # The sections of long keys look alike, so the last word must look alike too.
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.7)
    return next((key for key in near if _ratio(leaf, key.rpartition(".")[2]) >= 0.6), None)


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _walk(section: type[BaseModel], prefix: str, around: tuple[tuple[str, Rule], ...] = ()) -> Iterator[Key]:
    """`around` are the rules of the sections outside of this one, the outermost first, with the places they are for."""
    around = (*around, *((prefix, rule) for rule in getattr(section, "rules", ())))
    for name, field in section.model_fields.items():
        key, inner = prefix + name, section_of(field)
        if inner is None:
            covering = (rule for place, rule in around if rule.covers(key.removeprefix(place)))
            yield Key(key, field, (*(extra_of(field, "rules") or ()), *covering))
        else:
            yield from _walk(inner, f"{key}.", around)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is Annotated:  # a string with a rule of its own, such as a path
        return _alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(one for part in typing.get_args(annotation) for one in _alternatives(part))
    return (annotation,)


_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "null"}


def _describe(kind: Any) -> str:
    (kind,) = _alternatives(kind) if typing.get_origin(kind) is Annotated else (kind,)
    if kind in _WORDS:
        return _WORDS[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in arguments)
    if origin is list:
        inner = arguments[0]
        return f"a list of {_describe(inner)}" if typing.get_origin(inner) is Literal else f"a list of {_plural(inner)}"
    if origin is tuple:
        return f"a list of {len(arguments)} {_plural(arguments[0])}"
    if origin is dict or kind is dict:
        return "a free-form mapping"
    return str(kind)


def _plural(kind: Any) -> str:
    return _describe(kind).split(" ", 1)[1] + "s"
