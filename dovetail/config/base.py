"""The base of every section, and how a section says all there is to say about its keys.

`key` gives the default, the range, the words for the documents and verl's spellings; `section` and `inherits` are the
same for groups of keys and for keys that take the value of another. What a run does with a key beside reading it is a
rule: `unused` (no effect: a notice) or `unsupported` (cannot run: an error when a run starts). Knows no key of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

ANY = object()
"""Stands for whatever value a key may have."""


When = Callable[[Any, str], bool]
"""A condition on the whole configuration, for the key with this name."""


@dataclass(frozen=True)
class Rule:
    """What happens to a key that is set, while `when` holds and the value is not one of `unless`.

    With `values` it is for these alone. A rule of a section is for the keys below that match `only` and not `but`.
    """

    outcome: Literal["unused", "unsupported"]
    why: str
    when: When | None = None
    values: tuple[Any, ...] | None = None
    unless: tuple[Any, ...] = ()
    only: tuple[str, ...] = ("*",)
    but: tuple[str, ...] = ()

    def words(self, config: Any, key: str) -> str:
        """`why`, with `{section}` as the section of the key and any other `{name}` as its value."""

        def filled(match: re.Match[str]) -> str:
            name = match[1]
            return key.rpartition(".")[0] if name == "section" else str(look_up(config, key, name))

        return re.sub(r"\{([\w.]+)\}", filled, self.why)

    def covers(self, name: str) -> bool:
        """Whether the rule is for the key that is called `name` below the rule's section."""
        matches = any(fnmatchcase(name, pattern) for pattern in self.only)
        return matches and not any(fnmatchcase(name, pattern) for pattern in self.but)

    def applies(self, config: Any, key: str, value: Any) -> bool:
        """Whether it holds for this key, set to this value, in this configuration."""
        if value is not ANY and (value in self.unless or (self.values is not None and value not in self.values)):
            return False
        return self.when is None or self.when(config, key)


class Section(BaseModel):
    """A frozen group of keys. Unknown keys are refused; every field documents itself.

    `rules` is the section's table: what holds for several of its keys.
    """

    rules: ClassVar[tuple[Rule, ...]] = ()

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        # Sections are built once, from the root: building each one alone as well would double the import time.
        defer_build=True,
        # `trainer.experiment_name=42` is a name, not a mistake.
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


def unused(why: str, when: When | None = None, *, unless: tuple = (), only: str = "*", but: str = "") -> Rule:
    """The key has no effect while `when` holds (always without it). `unless` are values that ask for no more."""
    return Rule("unused", why, when, None, unless, tuple(only.split()), tuple(but.split()))


def unsupported(why: str, *values: Any, when: When | None = None, unless: tuple = (), only: str = "*") -> Rule:
    """A run with one of `values` (any but the default without them) is refused while `when` holds."""
    return Rule("unsupported", why, when, values or None, unless, tuple(only.split()))


@dataclass(frozen=True)
class ReadWith:
    """Holds while the key `name` has none of `values`. With `known`, names that are not in it may do anything."""

    name: str
    values: tuple[Any, ...]
    known: tuple[Any, ...] = ()

    def __call__(self, config: Any, key: str) -> bool:
        value = look_up(config, key, self.name)
        return value not in self.values and (not self.known or value in self.known)


def read_with(name: str, *values: Any, known: tuple[Any, ...] = (), unless: tuple = (), only: str = "*") -> Rule:
    """The key has an effect only where the key `name` has one of `values`; `.name` is in the same section."""
    words = " or ".join(str(value) for value in values)
    setting = f"{{section}}{name}" if name.startswith(".") else name
    why = (
        f"{name.rpartition('.')[2].removesuffix('_in_force')} {words} reads it"
        if known
        else f"{setting}={words} reads it"
    )
    return Rule("unused", why, ReadWith(name.removeprefix("."), values, known), None, unless, tuple(only.split()))


def when_is(name: str, *values: Any) -> When:
    """Holds while the key `name` has one of `values`. A name that is not one of the root is looked for upwards."""
    return lambda config, key: look_up(config, key, name) in values


def when_not(name: str, *values: Any) -> When:
    """Holds while the key `name` has none of `values`."""
    return lambda config, key: look_up(config, key, name) not in values


def all_of(*conditions: When) -> When:
    """Holds while all conditions do."""
    return lambda config, key: all(condition(config, key) for condition in conditions)


def look_up(config: Any, key: str, name: str) -> Any:
    """The value of `name`: of the root, or of the nearest section around `key` that has it. None where none has."""
    first = name.partition(".")[0]
    sections = [config]
    for part in key.split(".")[:-1]:
        sections.append(getattr(sections[-1], part))
    for node in (config, *reversed(sections)):
        if hasattr(node, first):
            for part in name.split("."):
                node = getattr(node, part)
            return node
    return None


Rules = Rule | tuple[Rule, ...]


def key(
    default: Any, words: str, *, rules: Rules = (), was: str = "", reads: Mapping[Any, Any] | None = None, **limits: Any
) -> Any:
    """A key with its default, its words for the documents, its rules and its range (`ge`, `gt`, `le`, `lt`).

    `was` are other names of it in the same section, `reads` other spellings of its values: verl's, or older ones.
    """
    return Field(default, description=words, json_schema_extra=_extra(rules, was=was, reads=reads), **limits)


def section(kind: type[Section]) -> Any:
    """A section below this one. Its words are the docstring of `kind`, its rules those of `kind`."""
    return Field(kind.model_construct())


def inherits(source: str, kind: type[Section], words: str = "", *, keeps_null: bool = False, rules: Rules = ()) -> Any:
    """A key that takes the value of `source` when it is unset or null; with `keeps_null` only when unset.

    Range and words are those of the field of `kind`. The root resolves the value (see `dovetail.config.inherit`).
    """
    field = kind.model_fields[source.rpartition(".")[2]]
    return Field(
        field.default,
        description=f"{words or field.description} {'Unset' if keeps_null else 'Null'}: same as `{source}`.",
        json_schema_extra=_extra(rules, inherits=source, keeps_null=keeps_null),
        **bounds_of(field),
    )


def _extra(rules: Rules, **more: Any) -> Any:
    return {"rules": (rules,) if isinstance(rules, Rule) else rules, **more}


def bounds_of(field: FieldInfo) -> dict[str, Any]:
    """The range of a field: `ge`, `gt`, `le`, `lt` where they are given."""
    names = ("ge", "gt", "le", "lt")
    return {name: getattr(each, name) for each in field.metadata for name in names if hasattr(each, name)}


def extra_of(field: FieldInfo, name: str) -> Any:
    """What the helpers above wrote beside a field, by the name of their parameter."""
    extra = field.json_schema_extra
    return extra.get(name) if isinstance(extra, dict) else None


def from_home(path: str) -> str:
    """`path` with `~` as a shell would have it. Raises ValueError for the home of a user who does not exist."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ValueError(f"{user} is the home of no user here; write the whole path, or ./{path} for that very name.")
    return expanded


HomePath = Annotated[str, AfterValidator(from_home)]
"""A path of the configuration: `~` is expanded once, here, and not by every part that reads a path."""
