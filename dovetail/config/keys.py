"""A flat catalogue of every key: its field, its type in words, and the nearest known key to a wrong one."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dovetail.config.base import Rule, extra_of


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
    def free_form(self) -> bool:
        """Whether anything may be written below this key."""
        return any(typing.get_origin(kind) is dict or kind is dict for kind in _alternatives(self.field.annotation))

    @property
    def type_in_words(self) -> str:
        """What values are accepted, for messages and documents."""
        return describe_type(self.field)

    @property
    def default(self) -> Any:
        """The default, or None where there is none."""
        value = self.field.default
        return None if value is PydanticUndefined else value

    def accepts(self, kind: type) -> bool:
        """Whether `kind` is one of the declared types."""
        return kind in _alternatives(self.field.annotation)


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
    if name in known:
        return known[name]
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        above = ".".join(parts[:length])
        if above in known:
            return known[above] if known[above].free_form else None
        section = sections(root).get(above)
        if section is not None:
            extra = section.model_config.get("extra") == "allow"
            return Key(name, FieldInfo(annotation=dict[str, Any])) if extra else None
    return None


def nearest_key(root: type[BaseModel], name: str) -> str | None:
    """The known key that a wrong one most likely means."""
    known = list(catalogue(root)) + list(sections(root))
    section, _, leaf = name.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    if close := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6):
        return siblings[close[0]]
    namesakes = [key for key in known if key.rpartition(".")[2] == leaf]
    if namesakes:
        words = set(name.split("."))
        return max(namesakes, key=lambda key: len(words & set(key.split("."))))
    # The sections of long keys look alike, so the last word must look alike too.
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.7)
    return next((key for key in near if _ratio(leaf, key.rpartition(".")[2]) >= 0.6), None)


def describe_type(field: FieldInfo) -> str:
    """The accepted values in words: `an integer >= 1, or null`."""
    names: list[str] = []
    for kind in _alternatives(field.annotation):
        names.append(_describe(kind))
    bounds = " and ".join(_bounds(field))
    optional = "null" in names
    names = [name for name in names if name != "null"]
    words = " or ".join(names) + (f" {bounds}" if bounds else "")
    return words + (", or null" if optional else "")


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _walk(section: type[BaseModel], prefix: str, around: tuple[tuple[str, Rule], ...] = ()) -> Iterator[Key]:
    """`around` are the rules of the sections outside of this one, the outermost first, with the places they are for."""
    around = (*around, *((prefix, rule) for rule in getattr(section, "rules", ())))
    for name, field in section.model_fields.items():
        inner, rules = section_of(field), extra_of(field, "rules") or ()
        if inner is None:
            key = prefix + name
            covering = (rule for place, rule in around if rule.covers(key.removeprefix(place)))
            yield Key(key, field, (*rules, *covering))
        else:
            place = f"{prefix}{name}."
            yield from _walk(inner, place, (*around, *((place, rule) for rule in rules)))


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


def _bounds(field: FieldInfo) -> Iterator[str]:
    for constraint in field.metadata:
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            bound = getattr(constraint, attribute, None)
            if bound is not None:
                yield f"{sign} {bound}"
